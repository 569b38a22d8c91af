"""Memory that ends: refused before loading where it can be seen, and no harm done where not."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvrt
from kvrt import backends
from kvrt.cli.chat import Talk, banner, converse
from kvrt.cli.line_reader import Message
from kvrt.cli.main import run
from kvrt.config import ModelConfig
from kvrt.errors import OutOfMemoryError, UsageError
from kvrt.generate import Model, cache_geometry
from kvrt.kvstore import KVSpec, estimate
from kvrt.room import Need, check_room, check_weights, fitting_context
from kvrt.sampler import SamplingParams
from kvrt.session import Session, growing
from tests.helpers.emulated_device import emulated_ops
from tests.helpers.fake_model import fake_model
from tests.helpers.tiny_model import write_tiny_model

F16 = KVSpec.parse("f16")


# --- refused before anything is loaded ---


@pytest.fixture
def config(tmp_path: Path) -> ModelConfig:
    return write_tiny_model(tmp_path / "m", num_layers=2, tokenizer=True, head_dim=64)


def needed(config: ModelConfig, tokens: int, weights: int = 1000, spec: KVSpec = F16) -> int:
    return Need.of(config, cache_geometry(config), spec, weights, tokens).bytes


def test_a_need_has_weights_cache_and_what_computes(config: ModelConfig) -> None:
    geometry = cache_geometry(config)
    need = Need.of(config, geometry, F16, 1000, 500)
    assert (need.weights, need.cache) == (1000, estimate(geometry, F16, 500))
    assert need.bytes == need.weights + need.cache + need.work
    more = Need.of(config, geometry, F16, 1000, 1500)
    row = config.num_kv_heads * config.head_dim
    assert more.work - need.work == 1000 * 2 * row * (4 + 2)  # K and V, f32 and halves


@pytest.mark.parametrize("spec", ["f16", "kvrt4"])
def test_a_context_that_was_asked_for_has_to_fit(config: ModelConfig, spec: str) -> None:
    geometry, format_ = cache_geometry(config), KVSpec.parse(spec)
    exact = needed(config, 200, spec=format_)

    def check(free: int) -> None:
        check_room("m", config, geometry, format_, 1000, 200, 256, free)

    check(exact)
    check(0)  # unknown
    with pytest.raises(UsageError) as caught:
        check(exact - 1)
    message = str(caught.value)
    assert message.startswith(f"m with 200 tokens in {format_} takes 0.06 GiB (0.00 GiB weights")
    fitting = fitting_context(config, geometry, format_, 1000, 200, exact - 1)
    assert message.endswith(f"; {fitting:,} tokens would fit") and 0 < fitting < 200
    assert needed(config, fitting, spec=format_) < exact
    assert needed(config, fitting + 1, spec=format_) >= exact


def test_the_models_own_limit_is_no_request(config: ModelConfig) -> None:
    geometry, small = cache_geometry(config), needed(config, 256)

    def check(free: int) -> None:
        check_room("m", config, geometry, F16, 1000, None, 1 << 30, free)

    check(small)  # a billion tokens would not fit by far
    with pytest.raises(UsageError, match=r"^m with 256 tokens .* [0-9]+ tokens would fit$"):
        check(small - 1)
    with pytest.raises(UsageError, match=r"no context would fit$"):
        check(1001)
    with pytest.raises(UsageError, match=r"^the weights of m take 0\.00 GiB, more than"):
        check(999)


def test_weights_alone() -> None:
    check_weights("m", 10, 10)
    check_weights("m", 10, 0)
    with pytest.raises(UsageError, match=r"^the weights of m take 2\.00 GiB, more than the 1\.00"):
        check_weights("m", 2 << 30, 1 << 30)


def test_load_asks_before_it_loads(config: ModelConfig, tmp_path: Path, monkeypatch: Any) -> None:
    name = str(tmp_path / "m")
    weights = kvrt.load(name, device="cpu").weight_bytes

    class Reached(Exception):
        pass

    def get_ops(device: str, threads: int | None) -> Any:
        raise Reached

    monkeypatch.setattr(backends, "get_ops", get_ops)
    monkeypatch.setattr(backends, "check_device", lambda device: None)
    monkeypatch.setattr(backends, "shared_memory", lambda device: 227 << 10)
    free = [needed(config, 256, weights)]
    monkeypatch.setattr(backends, "available_memory", lambda device: free[0])
    for how in ({}, {"max_context": 256}):
        with pytest.raises(Reached):
            kvrt.load(name, device="cuda", **how)
    free[0] -= 1
    for how in ({}, {"max_context": 256}):
        with pytest.raises(UsageError, match="would fit"):
            kvrt.load(name, device="cuda", **how)
    with pytest.raises(Reached):
        kvrt.load(name, device="cuda", max_context=1)
    with pytest.raises(Reached):
        kvrt.load(name, device="cuda", max_context=256, check_memory=False)
    with pytest.raises(Reached):  # its weights stay in their file
        kvrt.load(name, device="cpu", max_context=256)


def test_memory_that_ends_while_loading(config: Any, tmp_path: Path, monkeypatch: Any) -> None:
    def fail(self: Any, array: Any) -> Any:
        raise MemoryError("Unable to allocate")

    ended: list[str] = []
    monkeypatch.setattr("kvrt.backends.cpu.CpuOps.matrix", fail)
    monkeypatch.setattr("kvrt.backends.cpu.CpuOps.trim", lambda ops: ended.append(ops.name))
    with pytest.raises(OutOfMemoryError, match=r"no memory for the weights of .*m: Unable to"):
        kvrt.load(str(tmp_path / "m"), device="cpu")
    assert ended == ["cpu"]


def test_the_banner_says_what_memory_is_there_for(
    config: ModelConfig, tmp_path: Path, monkeypatch: Any
) -> None:
    model = kvrt.load(str(tmp_path / "m"), device="cpu")
    assert model.room() is None
    shown = banner(model, model.chat(), interactive=False)
    assert shown.endswith("; context limit 256")
    model.device = "cuda"
    free = [needed(config, 100, weights=0)]
    monkeypatch.setattr(backends, "available_memory", lambda device: free[0])
    assert model.room() == 100
    assert banner(model, model.chat(), interactive=False) == f"{shown}, memory for about 100"
    free[0] = 1 << 40
    assert model.room() == 256
    assert banner(model, model.chat(), interactive=False) == shown


# --- while a cache grows ---


@contextmanager
def failing_at(target: Any, which: int, names: Sequence[str] = ("empty",)) -> Iterator[list[int]]:
    """Have the allocation of that number fail; gives a list with the number of all so far."""
    count = [0]

    def limited(make: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            count[0] += 1
            if count[0] == which:
                raise MemoryError("Unable to allocate")
            return make(*arguments, **named)

        return call

    for name in names:
        setattr(target, name, limited(getattr(target, name)))
    try:
        yield count
    finally:
        for name in names:
            delattr(target, name)


@pytest.fixture(params=["f16", "k=int4:channel:g32:page,v=int4:token:g32,sink=4"])
def model(request: pytest.FixtureRequest, config: ModelConfig, tmp_path: Path) -> Model:
    # One thread, so that scratch memory grows in the first run alone.
    return kvrt.load(str(tmp_path / "m"), device="cpu", kv=request.param, threads=1)


IDS = [7 * i % 250 for i in range(200)]


@pytest.mark.parametrize(("cached", "fed"), [(0, 150), (60, 190), (135, 136)])
def test_wherever_memory_ends_a_session_goes_on(model: Model, cached: int, fed: int) -> None:
    """Each allocation of a prefill, or of steps that need a new page, fails once."""

    def run(session: Any) -> np.ndarray:
        if fed - cached > 1:
            return session.feed(IDS[:fed])
        for count in range(fed, len(IDS)):
            logits = session.feed(IDS[:count])
        return logits

    def begun() -> Any:
        session = model.new_session()
        if cached:
            session.feed(IDS[:cached])
        return session

    expected, session = run(begun()), begun()
    with failing_at(model.ops, 0) as count:
        run(session)
    total = count[0]
    assert total >= 1
    for which in range(1, total + 1):
        session = begun()
        with failing_at(model.ops, which), pytest.raises(OutOfMemoryError) as caught:
            run(session)
        held = len(session.store)
        assert session.tokens[:cached] == IDS[:cached] and len(session.tokens) == held
        assert str(caught.value).startswith(
            f"context limit on this device: {held:,} tokens are cached and there is no memory for"
        )
        geometry = cache_geometry(model.config)
        assert session.store.stats().bytes == estimate(geometry, model.spec, held)
        assert np.array_equal(run(session), expected)
    model.new_session().feed(IDS[:10])


@pytest.mark.parametrize(("cached", "every"), [(0, 5), (63, 1)])
@pytest.mark.parametrize("kv", ["f16", "k=int4:channel:g32:page,v=int4:token:g32,sink=4"])
def test_wherever_a_gpus_memory_ends_a_session_goes_on(
    config: ModelConfig, tmp_path: Path, kv: str, cached: int, every: int, monkeypatch: Any
) -> None:
    """The CUDA backend, emulated: a prefill of 69 tokens, or six steps that fill a page."""
    ops: Any = emulated_ops()
    monkeypatch.setattr(backends, "get_ops", lambda device, threads: ops)
    model = kvrt.load(str(tmp_path / "m"), device="cpu", kv=kv)
    names = ("empty", "zeros", "upload")

    def begun() -> Session:
        session = model.new_session()
        if cached:
            session.feed(IDS[:cached])
        return session

    def run(session: Session) -> np.ndarray:
        for count in range(cached + 1, 70) if cached else (69,):
            logits = session.feed(IDS[:count])
        return logits

    expected = run(begun())
    session = begun()
    with failing_at(ops.device, 0, names) as count:
        run(session)
    assert count[0] > 0
    for which in range(1, count[0] + 1, every):
        session = begun()
        with failing_at(ops.device, which, names), pytest.raises(OutOfMemoryError) as caught:
            run(session)
        held = len(session.store)
        assert f": {held:,} tokens are cached and" in str(caught.value)
        assert held >= cached and session.tokens == IDS[:held]
        assert np.array_equal(run(session), expected)


def test_logits_say_it_too(model: Model) -> None:
    expected = model.logits(IDS)
    with failing_at(model.ops, 0) as count:
        model.logits(IDS)
    for which in (1, count[0] // 2, count[0]):
        with failing_at(model.ops, which), pytest.raises(OutOfMemoryError, match="limit on this"):
            model.logits(IDS)
    assert np.array_equal(model.logits(IDS), expected)


def test_what_failed_holds_no_memory() -> None:
    class Large:
        pass

    import weakref

    held: list[Any] = []

    def fail() -> None:
        large = Large()
        held.append(weakref.ref(large))
        raise MemoryError("no more")

    with pytest.raises(OutOfMemoryError) as caught, growing([], 3):
        fail()
    assert caught.value.__cause__ is not None and held[0]() is None
    assert str(caught.value) == (
        "context limit on this device: 0 tokens are cached and there is no memory for 3 more "
        "(no more)"
    )


def test_other_errors_pass() -> None:
    with pytest.raises(KeyError), growing([], 1):
        raise KeyError("x")


def ending(model: Any, when: int) -> Callable[[], None]:
    """Have the fake decoder's call of that number, and later ones, find no memory."""
    decoder, calls = model.decoder, [0]
    real = decoder.decode

    def decode(token_id: int, store: Any) -> np.ndarray:
        calls[0] += 1
        if calls[0] >= when:
            raise MemoryError("cuda:0 is full")
        return real(token_id, store)

    decoder.decode = decode

    def again() -> None:
        decoder.decode = real

    return again


def test_a_chat_keeps_the_answer_so_far_and_goes_on() -> None:
    model = fake_model()
    more_memory = ending(model, 3)
    chat = model.chat(sampling=SamplingParams(temperature=0.0))
    pieces: list[str] = []
    with pytest.raises(OutOfMemoryError, match="context limit on this device"):
        pieces.extend(chat.send("hi"))
    kept = chat.messages[-1]["content"]
    assert [m["role"] for m in chat.messages] == ["user", "assistant"] and kept == "hel"
    assert chat.finish_reason == "interrupted"
    more_memory()
    assert "".join(chat.send("more")) == "hello"
    assert [m["content"] for m in chat.messages] == ["hi", "hel", "more", "hello"]
    assert chat.stats().peak_bytes == model.ops.peak_bytes()


def test_a_conversation_at_the_terminal_goes_on(capsys: Any) -> None:
    model = fake_model()
    more_memory = ending(model, 3)
    chat = model.chat(sampling=SamplingParams(temperature=0.0))
    lines = iter(["hi", "/stats", "more"])

    class Reader:
        def read(self) -> Message:
            text = next(lines, None)
            if text is None:
                raise EOFError
            if text == "more":
                more_memory()
            return Message(text)

    talk = Talk(chat, verbose=False, colour=False, interactive=True)
    model.spec = "f16"  # type: ignore[assignment]
    converse(talk, Reader(), after_turn=lambda: None)
    out, err = capsys.readouterr()
    assert out == "hel\nhello\n"
    (line,) = [line for line in err.splitlines() if "error" in line]
    assert line.startswith("kvrt: error: context limit on this device: ")
    assert line.endswith("; /clear starts afresh")


def test_a_command_ends_with_1(
    config: ModelConfig, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    def fail(*_: Any) -> Any:
        raise MemoryError("Unable to allocate 9 bytes")

    monkeypatch.setattr("kvrt.models.decoder.Decoder.decode", fail)
    words = ["-m", str(tmp_path / "m"), "-p", "abc", "-n", "5", "-l", "65+1000", "--temp", "0"]
    assert run(["generate", *words]) == 1
    out, err = capsys.readouterr()
    assert out == "A" and err == (
        "kvrt: error: context limit on this device: 3 tokens are cached and there is no memory "
        "for 1 more (Unable to allocate 9 bytes)\n"
    )
