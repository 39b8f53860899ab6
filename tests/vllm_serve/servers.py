"""vLLM's servers with a KV connector, and a router's part of talking to them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import time
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
from integrations.vllm.servers import free_ports

HERE = Path(__file__).parent
ENVIRONMENT = HERE.parent.parent / "build" / "vllm"
"""What `make test-vllm` installed vLLM into."""

MODEL = ENVIRONMENT / "model"

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Answer:
    status: int
    """Of HTTP."""
    tokens: tuple[int, ...] = ()
    text: str = ""
    params: Params | None = None
    """``kv_transfer_params`` for the other server."""


class Server:
    """`vllm serve`, at a port of its own for HTTP and another for its connector."""

    def __init__(
        self,
        connector: str,
        role: str,
        log: Path,
        policy: str = "fail",
        fault: Path | None = None,
    ) -> None:
        """``policy``: vLLM's ``kv_load_failure_policy``. ``fault``: see faults/faults.py."""
        self.ours = connector == "AioFlagcxConnector"
        self.port, self.side_port = (free_ports(2) + index for index in range(2))
        self.name = f"{connector} {role} {policy}"
        self.log = log
        transfer: dict[str, Any] = {
            "kv_connector": connector,
            "kv_role": f"kv_{role}",
            "kv_load_failure_policy": policy,
        }
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_HOST_IP": "127.0.0.1",
            # Only then does MooncakeConnector's prefill give up the blocks of a failed transfer.
            "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": "60",
            "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(self.side_port),
            "VLLM_NO_USAGE_STATS": "1",
            "OMP_NUM_THREADS": "1",
        }
        if self.ours:
            module = "faulty_connector" if fault else "aioflagcx.integrations.vllm"
            transfer["kv_connector_module_path"] = module
            transfer["kv_connector_extra_config"] = {"host": "127.0.0.1", "port": self.side_port}
        else:
            transfer["kv_connector_extra_config"] = {"mooncake_protocol": "tcp"}
            environment["PYTHONPATH"] = _shims()
        if fault:
            environment["PYTHONPATH"] = str(HERE / "faults")
            environment["ENGINE_FAULT"] = str(fault)
        # One request at a time, as sums are rounded differently in batches of other sizes.
        self._command = [
            ENVIRONMENT / "bin" / "vllm", "serve", MODEL, "--served-model-name", "model",
            "--host", "127.0.0.1", "--port", str(self.port), "--dtype", "bfloat16",
            "--block-size", "32", "--no-enable-prefix-caching", "--enforce-eager",
            "--max-model-len", "2048", "--max-num-seqs", "1",
            "--kv-transfer-config", json.dumps(transfer),
        ]  # fmt: skip
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,  # a group of its own, for its children
            )

    def wait(self) -> None:
        """Until it answers."""
        assert self._process is not None
        while self._process.poll() is None:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{self.url}/health", timeout=10).close()
                return
            time.sleep(0.2)
        raise AssertionError(f"{self.name} ended with {self._process.returncode}:\n{self.tail()}")

    def kill(self) -> None:
        """SIGKILL, to all its processes."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def tail(self) -> str:
        """The end of what it wrote."""
        return self.log.read_bytes()[-6000:].decode(errors="replace")

    async def complete(self, prompt: str, tokens: int, params: Params | None = None) -> Answer:
        """Greedily."""
        job = {
            "model": "model",
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "return_token_ids": True,
            "kv_transfer_params": params,
        }
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(300)) as http,
            http.post(f"{self.url}/v1/completions", json=job) as answer,
        ):
            if answer.status != 200:
                return Answer(answer.status)
            result = await answer.json()
            choice = result["choices"][0]
            return Answer(
                200, tuple(choice["token_ids"]), choice["text"], result.get("kv_transfer_params")
            )

    async def gauge(self, name: str) -> float:
        """A metric of it, summed over its labels."""
        async with aiohttp.ClientSession() as http, http.get(f"{self.url}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        values = [float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}{{")]
        assert values, f"{self.name} has no metric {name}"
        return sum(values)

    async def until(self, name: str, value: float) -> None:
        """Until that metric has that value."""
        while await self.gauge(name) != value:  # noqa: ASYNC110 - it is in another process
            await asyncio.sleep(0.05)


def _shims() -> str:
    command = [ENVIRONMENT / "bin" / "python", "-m", "aioflagcx.integrations", "path"]
    ended = subprocess.run(command, cwd=ENVIRONMENT, capture_output=True, text=True, check=True)
    return ended.stdout.strip()


class Router:
    """Sends requests to one prefill and one decode server."""

    def __init__(self, prefill: Server, decode: Server) -> None:
        self.prefill = prefill
        self.decode = decode

    def tickets(self) -> tuple[Params, Params]:
        """``kv_transfer_params`` of a request, for prefill and for decode."""
        transfer = uuid.uuid4().hex
        side = self.prefill.side_port
        source: Params = {"do_remote_prefill": True, "transfer_id": transfer}
        if self.prefill.ours:
            source |= {
                "remote_host": "127.0.0.1",
                "remote_port": side,
                "remote_tp_size": 1,
            }
        else:
            address = f"http://127.0.0.1:{side}"
            with urllib.request.urlopen(f"{address}/query") as answer:
                (engine,) = json.load(answer).values()
            source |= {"remote_engine_id": engine["engine_id"], "remote_bootstrap_addr": address}
        return {"do_remote_decode": True, "transfer_id": transfer}, source

    async def prefill_first(self, prompt: str, tokens: int) -> Answer:
        offer, source = self.tickets()
        assert (await self.prefill.complete(prompt, 1, offer)).status == 200
        return await self.decode.complete(prompt, tokens, source)

    async def by_the_answer(self, prompt: str, tokens: int) -> Answer:
        """Prefill chooses the transfer, and its answer is handed on to decode."""
        prefilled = await self.prefill.complete(prompt, 1, {"do_remote_decode": True})
        assert prefilled.status == 200
        assert prefilled.params is not None
        return await self.decode.complete(prompt, tokens, prefilled.params)

    async def decode_first(self, prompts: list[str], tokens: int) -> list[Answer]:
        """Decode waits for all of them before prefill gets the first."""
        answers, offers = await self.decode_waits(prompts, tokens)
        await self.prefill_offers(prompts, offers)
        return await asyncio.gather(*answers)

    async def decode_waits(
        self, prompts: list[str], tokens: int
    ) -> tuple[list[asyncio.Task[Answer]], list[Params]]:
        """Requests that decode waits with, and what prefill is to get for them."""
        tickets = [self.tickets() for _ in prompts]
        answers = [
            asyncio.create_task(self.decode.complete(prompt, tokens, source))
            for prompt, (_, source) in zip(prompts, tickets, strict=True)
        ]
        await self.decode.until("num_requests_waiting", len(prompts))
        return answers, [offer for offer, _ in tickets]

    async def prefill_offers(self, prompts: list[str], offers: list[Params]) -> None:
        """Prefill computes them for whoever fetches them."""
        computing = [
            self.prefill.complete(prompt, 1, offer)
            for prompt, offer in zip(prompts, offers, strict=True)
        ]
        assert {offered.status for offered in await asyncio.gather(*computing)} == {200}


@contextlib.contextmanager
def running(*servers: Server) -> Iterator[None]:
    """Started together, and killed at the end."""
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait()
        yield
    finally:
        for server in servers:
            server.kill()
