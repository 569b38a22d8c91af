"""Attention of one query by torch's SDPA on a GPU, timed as bench_kernels.py times kvrt's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

Row = dict[str, Any]


class TorchAttention:
    """SDPA on f16 keys and values, by its flash and its cuDNN backend.

    A group of query heads that share a KV head is given to torch in two ways: as heads
    (`enable_gqa`), and as rows of one head, which is the same for one query; the faster one counts.
    """

    def __init__(self, torch: Any, shape: Any, cold: int, least: int, repetitions: int) -> None:
        self._torch = torch
        self._shape = shape
        self._cold = cold
        self._least = least
        self._repetitions = repetitions

    @classmethod
    def found(cls, *arguments: Any) -> TorchAttention | None:
        """None where torch is not installed or sees no GPU."""
        try:
            import torch
        except ImportError:
            return None
        return cls(torch, *arguments) if torch.cuda.is_available() else None

    def measured(self, context: int) -> Iterator[tuple[Row, int, list[float]]]:
        """Of each backend: its row, bytes moved, and microseconds of a call in each repetition."""
        from torch.nn.attention import SDPBackend

        shape, torch = self._shape, self._torch
        row_bytes = shape.kv_heads * shape.head_dim * 2
        nbytes = 2 * context * row_bytes
        copies = min(max(-(-self._cold // nbytes), 2), 64)
        sides = [
            [
                torch.randn(
                    (1, shape.kv_heads, context, shape.head_dim), device="cuda", dtype=torch.float16
                )
                for _ in range(copies)
            ]
            for _ in range(2)
        ]
        group = shape.heads // shape.kv_heads
        ways = {
            "heads": (1, shape.heads, 1, shape.head_dim),
            "rows": (1, shape.kv_heads, group, shape.head_dim),
        }
        moved = nbytes + 2 * shape.heads * shape.head_dim * 2
        for name, backend in (
            ("torch flash f16", SDPBackend.FLASH_ATTENTION),
            ("torch cuDNN f16", SDPBackend.CUDNN_ATTENTION),
        ):
            best: tuple[list[float], str] | None = None
            for way, query in ways.items():
                q = torch.randn(query, device="cuda", dtype=torch.float16)
                try:
                    samples = self._timed(self._calls(q, *sides, backend, way == "heads"))
                except RuntimeError as error:
                    words = " ".join(str(error).split())
                    print(f"not measured: {name} ({way}): {words:.120}", flush=True)
                    torch.cuda.synchronize()
                    continue
                if best is None or sorted(samples) < sorted(best[0]):
                    best = samples, way
            if best is not None:
                row = {
                    "kernel": "attention",
                    "side": "torch",
                    "kv": name,
                    "bits_per_element": 16.0,
                    "query_heads_as": best[1],
                    "in_turn": copies,
                    "versions": {"torch": torch.__version__},
                }
                yield row, moved, best[0]
        del sides
        torch.cuda.empty_cache()

    def _calls(
        self, q: Any, keys: Sequence[Any], values: Sequence[Any], backend: Any, gqa: bool
    ) -> list[Callable[[], None]]:
        from torch.nn.attention import sdpa_kernel

        attend = self._torch.nn.functional.scaled_dot_product_attention

        def call(k: Any, v: Any) -> None:
            with sdpa_kernel(backend):
                attend(q, k, v, enable_gqa=gqa)

        return [lambda k=k, v=v: call(k, v) for k, v in zip(keys, values, strict=True)]  # type: ignore[misc]

    def _timed(self, calls: Sequence[Callable[[], None]]) -> list[float]:
        cuda = self._torch.cuda
        stream, rounds = cuda.Stream(), -(-self._least // len(calls))
        cuda.synchronize()
        with cuda.stream(stream), self._torch.no_grad():
            for call in calls:
                call()
            stream.synchronize()
            graph = cuda.CUDAGraph()
            with cuda.graph(graph, stream=stream):
                for _ in range(rounds):
                    for call in calls:
                        call()
            samples = []
            for number in range(self._repetitions + 2):
                begin, end = (cuda.Event(enable_timing=True) for _ in range(2))
                begin.record(stream)
                graph.replay()
                end.record(stream)
                end.synchronize()
                if number >= 2:  # the first ones warm up
                    samples.append(1e3 * begin.elapsed_time(end) / (rounds * len(calls)))
        return samples
