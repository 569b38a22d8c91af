"""What a chart's axes say: where a context stands, ticks and their words, labels kept apart."""

import math
import unicodedata
from collections.abc import Sequence
from itertools import pairwise

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB", "EB")  # those of bandwidths and of memory on sale


def context_place(context: float, least: float) -> float:
    """Where a context stands on an axis of doublings.

    No tokens at all stand one doubling below `least`, the least context above 0 of the chart.
    """
    return math.log2(context) if context > 0 else math.log2(least) - 1.0


def context_word(context: int) -> str:
    """A context as `--scan` takes it: 512, 8k, 1M."""
    for size, suffix in ((1 << 20, "M"), (1 << 10, "k")):
        if context >= size and context % size == 0:
            return f"{context // size}{suffix}"
    return str(context)


def context_ticks(contexts: Sequence[int], most: int) -> list[int]:
    """At most `most` of the contexts, evenly through their places, the last one among them.

    Powers of two where there are enough of them, else the contexts themselves.
    """
    every = sorted(set(contexts))
    if not every:
        return []
    least = next((context for context in every if context > 0), 1)
    powers = [1 << power for power in range(least.bit_length() - 1, every[-1].bit_length())]
    powers = [power for power in powers if least <= power <= every[-1]]
    if len(powers) >= 3:
        every = [context for context in every if context == 0] + powers
    step = math.ceil(len(every) / max(most, 1))
    return every[::-1][::step][::-1]


def bytes_word(count: float) -> str:
    """A number of bytes in three digits: `12.4 MB`."""
    power = 0
    while count >= 999.5 and power < len(_UNITS) - 1:
        count, power = count / 1000, power + 1
    if power == 0:
        return f"{count:.0f} B"
    digits = max(0, 2 - math.floor(math.log10(float(f"{count:.3g}"))))
    return f"{count:.{digits}f} {_UNITS[power]}"


def bytes_ticks(low: float, high: float, most: int) -> list[tuple[float, str]]:
    """Ticks of a logarithmic axis of bytes, with their words.

    1, 2 and 5 times powers of ten, or those powers alone where they are enough; round numbers of
    one unit where the range holds fewer than three.
    """
    decades = range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 1)
    for digits in ((1, 2, 5), (1,)):
        ticks = [digit * 10.0**decade for decade in decades for digit in digits]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) <= most:
            break
    ticks = ticks[:: max(math.ceil(len(ticks) / most), 1)]
    if len(ticks) < 3:
        size = 1000.0 ** min(max(0, math.floor(math.log(high, 1000))), len(_UNITS) - 1)
        ticks = [tick * size for tick in round_ticks(low / size, high / size, most)]
    return [(tick, _plain(bytes_word(tick))) for tick in ticks]


def _plain(word: str) -> str:
    """A number with a unit less the zeros at its end: `1.20 GB` is `1.2 GB`."""
    digits, unit = word.split()
    return f"{digits.rstrip('0').rstrip('.') if '.' in digits else digits} {unit}"


def time_unit(longest: float) -> tuple[float, str]:
    """The unit, in microseconds, and the name for times up to `longest` microseconds."""
    for size, name in ((1e6, "s"), (1e3, "ms")):
        if longest >= 2 * size:
            return size, name
    return 1.0, "µs"


def round_ticks(low: float, high: float, most: int) -> list[float]:
    """At most `most` multiples of 1, 2 or 5 times a power of ten from low to high."""
    if not high > low:
        return [low]
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    for step in (power, 2 * power, 5 * power, 10 * power, 20 * power):
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first + 1 <= most:
            break
    # Through a decimal, so that 3 * 0.1 is 0.3.
    return [float(f"{multiple * step:.10g}") for multiple in range(first, last + 1)]


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places as near as possible to the wanted ones, at least `gap` apart, within low ... high.

    The order is kept, equal ones in the order given. Where not all fit, they stand closer.
    """
    count = len(wanted)
    if count > 1:
        gap = min(gap, (high - low) / (count - 1))
    order = sorted(range(count), key=lambda index: wanted[index])
    # Less its own share of the gaps, each place must only not be below the one before: neighbours
    # in the wrong order are pooled at their mean, which is the nearest solution.
    pools: list[tuple[float, int]] = []
    for rank, index in enumerate(order):
        mean, size = wanted[index] - rank * gap, 1
        while pools and pools[-1][0] > mean:
            before, members = pools.pop()
            mean = (mean * size + before * members) / (size + members)
            size += members
        pools.append((mean, size))
    flat = [mean for mean, size in pools for _ in range(size)]
    places = [0.0] * count
    for rank, index in enumerate(order):
        inside = min(max(flat[rank], low), high - (count - 1) * gap)
        places[index] = inside + rank * gap
    return places


def shorten(name: str, width: int) -> str:
    """The name in at most `width` columns, its middle left out; no control or wide characters."""
    plain = "".join(
        letter if letter.isprintable() and _columns(letter) == 1 else "?" for letter in name
    )
    if len(plain) <= width:
        return plain
    if width < 7:
        return plain[:width]
    head = (width - 3) * 3 // 5
    return f"{plain[:head]}...{plain[len(plain) - (width - 3 - head) :]}"


def _columns(letter: str) -> int:
    if unicodedata.combining(letter):
        return 0
    return 2 if unicodedata.east_asian_width(letter) in "WF" else 1


def letter(rank: int) -> str:
    """A, B, C ...: what stands for a long name inside a chart."""
    return chr(ord("A") + rank) if rank < 26 else letter(rank // 26 - 1) + letter(rank % 26)


def polyline(points: Sequence[tuple[float, float]], steps: int) -> list[tuple[float, float]]:
    """The points and `steps` - 1 more between each two of them, on straight lines."""
    dense = list(points[:1])
    for (x0, y0), (x1, y1) in pairwise(points):
        dense += [
            (x0 + (x1 - x0) * part / steps, y0 + (y1 - y0) * part / steps)
            for part in range(1, steps + 1)
        ]
    return dense
