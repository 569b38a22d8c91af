"""The sampling that a model folder recommends for itself, in its generation_config.json."""

from pathlib import Path
from typing import Any

from .errors import UsageError
from .fields import Fields, read_object
from .sampler import SamplingParams

# Key of generation_config.json -> field of SamplingParams, and what the field takes, in words.
# `do_sample` is not read: files hold false because it is the writer's default, beside a
# temperature that someone chose.
_KEYS = {
    "temperature": ("temperature", "a finite number, 0 or more"),
    "top_k": ("top_k", "a whole number, 0 or less for all"),
    "top_p": ("top_p", "a number of 0 to 1"),
    "min_p": ("min_p", "a number of 0 to 1"),
    "repetition_penalty": ("repeat_penalty", "a finite number above 0"),
}
RECOMMENDABLE = frozenset(field for field, _ in _KEYS.values())


def recommended_sampling(folder: Path) -> SamplingParams:
    """The model's own sampling parameters; what it leaves out is as in SamplingParams.

    Raises ConfigError for an impossible value or a malformed file, StorageError when the file
    cannot be read.
    """
    path = folder / "generation_config.json"
    try:
        recommended = Fields(read_object(path), str(path))
    except FileNotFoundError:
        return SamplingParams()
    values: dict[str, Any] = {}
    for key, (field, expected) in _KEYS.items():
        if key not in recommended:
            continue
        values[field] = recommended.raw(key)
        try:
            SamplingParams(**{field: values[field]})
        except UsageError:
            raise recommended.fail(key, expected) from None
    return SamplingParams(**values)
