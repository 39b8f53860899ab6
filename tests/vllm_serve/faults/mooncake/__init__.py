"""In place of the drop-in's shim."""
