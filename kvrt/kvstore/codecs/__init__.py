"""Cache formats. One file each, and one line in the registry."""

from .base import TileCodec
from .blocks import Block
from .dense import Dense
from .fp8 import Fp8
from .intq import IntQ
from .nuq import Nuq
from .vq import Vq, VqBooks

__all__ = ["Block", "Dense", "Fp8", "IntQ", "Nuq", "TileCodec", "Vq", "VqBooks"]
