"""Where a model comes from: a folder, a pulled name, or "synthetic:NAME"."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from . import hub
from .config import ModelConfig
from .errors import ModelNotFoundError, UnsupportedError
from .shapes import SHAPES, Shape

if TYPE_CHECKING:
    from .sampler import SamplingParams
    from .synthetic import SyntheticWeights
    from .tokenizer import Tokenizer
    from .weights import Weights

PREFIX = "synthetic:"

AnyWeights: TypeAlias = "Weights | SyntheticWeights"


class ModelSource(Protocol):
    """A model that can be loaded. To have one costs no more than to read its config."""

    @property
    def name(self) -> str:
        """What it was asked for by."""
        ...

    @property
    def config(self) -> ModelConfig: ...

    @property
    def synthetic(self) -> bool:
        """Whether its weights are random, so that its text, and any error, means nothing."""
        ...

    @property
    def context_limit(self) -> int:
        """Most tokens of context that may be asked for; config.max_context is the default."""
        ...

    @property
    def folder(self) -> Path | None:
        """Its folder, if it has one."""
        ...

    def weights(self) -> AnyWeights:
        """Tensor name -> array or RandomMatrix, all checked. Raises WeightError, StorageError."""
        ...

    def tokenizer(self) -> Tokenizer:
        """Raises TokenizerError or TemplateError for a broken one."""
        ...

    def sampling(self) -> SamplingParams:
        """How its makers want tokens drawn. Raises ConfigError, StorageError."""
        ...

    def fingerprint(self, weights: Mapping[str, Any]) -> str:
        """What tells it from other models, given its weights: a hash in hex."""
        ...


@dataclass(frozen=True)
class FolderSource:
    """A model folder. See `ModelSource` for the members."""

    name: str
    folder: Path
    config: ModelConfig

    @property
    def synthetic(self) -> bool:
        return False

    @property
    def context_limit(self) -> int:
        return self.config.max_context

    def weights(self) -> Weights:
        from .models.families import expected_tensors, ignored_tensor
        from .weights import Weights

        return Weights.open(self.folder, expected_tensors(self.config), ignored_tensor)

    def tokenizer(self) -> Tokenizer:
        from .tokenizer import Tokenizer

        return Tokenizer.from_dir(self.folder, self.config)

    def sampling(self) -> SamplingParams:
        from .recommended import recommended_sampling

        return recommended_sampling(self.folder)

    def fingerprint(self, weights: Mapping[str, Any]) -> str:
        from .fingerprint import model_fingerprint

        return model_fingerprint(self.config, weights)


def find_source(name: str) -> ModelSource:
    """The model that a name stands for: a folder, a pulled name or "synthetic:NAME".

    Raises ModelNotFoundError for an unknown one, UnsupportedError for a model that kvrt cannot run,
    ConfigError or StorageError for a broken folder.
    """
    if not name.startswith(PREFIX):
        return _folder_source(name)
    from .synthetic import SyntheticSource

    shape = _published(name)
    if shape.config is None:
        raise UnsupportedError(
            f"{name} is for memory only: `kvrt info` and `kvrt bench --dry-run` take it"
        )
    return SyntheticSource(name, shape.config, shape.dtype)


def find_shape(name: str) -> Shape:
    """The shape of any model, also of those that kvrt knows for memory only; no weight is read.

    Raises as `find_source`, and WeightError for a folder whose weights do not fit its config.
    """
    if name.startswith(PREFIX):
        return _published(name)
    source = _folder_source(name)
    weights = source.weights()
    try:
        dtype = weights["model.embed_tokens.weight"].dtype
        shape = Shape.of(name, source.config, dtype, weights.nbytes)
        return replace(shape, context_limit=source.context_limit)
    finally:
        weights.close()


def _folder_source(name: str) -> FolderSource:
    try:
        folder = hub.resolve(name)
    except ModelNotFoundError as error:
        if name not in SHAPES:
            raise
        raise ModelNotFoundError(
            f"{error}; {PREFIX}{name} has its shape and random weights"
        ) from None
    return FolderSource(name, folder, ModelConfig.from_dir(folder))


def _published(name: str) -> Shape:
    wanted = name.removeprefix(PREFIX)
    if wanted in SHAPES:
        return SHAPES[wanted]
    near = difflib.get_close_matches(wanted.lower(), SHAPES, n=1)
    hint = f"did you mean {PREFIX}{near[0]}? There" if near else "there"
    raise ModelNotFoundError(f"no synthetic model {wanted!r:.80}; {hint} are {', '.join(SHAPES)}")
