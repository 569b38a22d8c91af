"""Every error that kvrt raises on purpose, and the exit code it ends a command with.

The message is one line: what was wrong, what was got, what was expected, what works.
"""


class KvrtError(Exception):
    """A run failed. Commands print the message as one line and exit with `exit_code`."""

    exit_code = 1


class UsageError(KvrtError, ValueError):
    """The request itself is wrong: an unknown name, an impossible value, a missing file."""

    exit_code = 2


class UnsupportedError(UsageError):
    """A valid request that kvrt does not implement (model type, RoPE type, device, format)."""


class ModelNotFoundError(UsageError):
    """No model folder, pulled model or known name answers to what was given."""


class ContextFullError(UsageError):
    """The tokens do not fit the context limit. Nothing was changed."""


class OutOfMemoryError(KvrtError, MemoryError):
    """The device has no memory left for what was to be done. Caches are as they were before."""


class ConfigError(KvrtError):
    """config.json, or a file beside it, is malformed or contradicts itself."""


class WeightError(KvrtError):
    """A weight file is truncated, malformed, or does not hold the tensors the config asks for."""


class TokenizerError(KvrtError):
    """tokenizer.json cannot be used."""


class TemplateError(KvrtError):
    """The chat template raises, loops or is refused by the sandbox."""


class CodecError(KvrtError):
    """A cache format was given data or a geometry that it cannot hold."""


class KernelError(KvrtError):
    """A kernel could not be built, or was launched with arguments it does not take."""


class DownloadError(KvrtError):
    """A model could not be fetched: no network, a wrong checksum, an unknown repository."""


class StorageError(KvrtError):
    """A file could not be written or read: no space, no permission."""
