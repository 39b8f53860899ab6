"""Drop-ins: this engine behind the classes that other projects' servers call.

- :mod:`.mooncake`: Mooncake's ``TransferEngine``, which vLLM, SGLang and others use.
- :mod:`.vllm`: a KV connector of our own for vLLM.
- :mod:`.flagcx`: the point-to-point half of FlagCX's ``FLAGCXLibrary``.

``python -m aioflagcx.integrations path`` prints the folder that, in PYTHONPATH, makes clients
import these in place of the originals. docs/integrations.md is the manual.
"""
