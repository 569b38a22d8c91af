"""kvrt: a torch-free runtime for Llama-family models, built around its KV cache.

>>> import kvrt
>>> model = kvrt.load("smollm2")
>>> print(model.generate("The capital of France is", max_tokens=8).text)

`load(..., kv="kvrt2")` names a cache format, `model.new_store()` makes an empty cache in it: a
`KVStore`, whose tokens are packed page by page as they come, or a `ZoneStore` for formats such as
`rdkv:1024`, whose prompts are compressed once, at their end: `store.widths(layer)` says to what.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

_root = Path(__file__).resolve().parent.parent
if (_root / "setup.cfg").is_file() and (_root / "cuda_src").is_dir():
    # A checkout, not site-packages: kvrt.models, kvrt.cli and kvrt.cuda_src live beside kvrt/.
    __path__.append(str(_root))

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .chat import Chat
    from .errors import KvrtError
    from .generate import Generation, Model, load
    from .kvstore import KVSpec, KVStore
    from .sampler import SamplingParams
    from .trizone.store import ZoneStore

_HOMES = {
    "Chat": ".chat",
    "Generation": ".generate",
    "KVSpec": ".kvstore",
    "KVStore": ".kvstore",
    "KvrtError": ".errors",
    "Model": ".generate",
    "SamplingParams": ".sampler",
    "ZoneStore": ".trizone.store",
    "load": ".generate",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that `kvrt --help` stays instant."""
    if name not in _HOMES:
        raise AttributeError(f"module 'kvrt' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
