"""CUDA sources (.cu, .cuh), compiled at run time by NVRTC."""

from pathlib import Path

SOURCE_DIR = Path(__file__).resolve().parent
