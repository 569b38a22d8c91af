"""--kv, --kv-k, --kv-v and --calibration: what they make together and what a command gets."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvrt.backends.cpu import CpuOps
from kvrt.backends.view import TURNS
from kvrt.cli.info import model_facts
from kvrt.cli.kv_options import (
    Format,
    fitting_formats,
    resolve_formats,
    resolve_kv,
    split_formats,
)
from kvrt.cli.main import run
from kvrt.cli.options import ModelChoice, open_model
from kvrt.config import ModelConfig
from kvrt.errors import KvrtError, UnsupportedError, UsageError
from kvrt.generate import cache_geometry
from kvrt.kvstore import (
    PRESETS,
    Geometry,
    KVSpec,
    KVStore,
    Rotary,
    bits_per_element,
    bytes_per_token,
    fixed_bytes,
)
from tests.helpers.tiny_model import write_tiny_model


@pytest.mark.parametrize(
    ("kv", "kv_k", "kv_v", "default", "spec"),
    [
        (None, None, None, "f16", "f16"),
        (None, None, None, "kvrt4", "kvrt4"),
        ("q8_0", None, None, "kvrt4", "q8_0"),
        (" k=q8_0 , v=q8_0 ", None, None, "kvrt4", "q8_0"),
        # Without --kv a side replaces that of f16, whatever the default is, as in llama.cpp.
        (None, "q8_0", None, "kvrt4", "k=q8_0,v=f16"),
        (None, None, "q4_0", "kvrt4", "k=f16,v=q4_0"),
        (None, "q8_0", "q8_0", "kvrt4", "q8_0"),
        (None, "int4:g64:channel:page", "int2:token:g32", "f16",
         "k=int4:channel:g64:page,v=int2:token:g32"),
        # With it sinks, window and single layers stay.
        ("kvrt2", "f16:page", None, "f16",
         "k=f16:page,v=int2:token:g64:had,sink=4,window=128"),
        ("kivi2,layers[0]=f8", None, "bf16", "f16",
         "k=int2:channel:g32,v=bf16,window=128,layers[0]=f8"),
        ("kvrt2", None, "int3:token:g64:had", "f16", "kvrt3"),
    ],
)  # fmt: skip
def test_resolve(
    kv: str | None, kv_k: str | None, kv_v: str | None, default: str, spec: str
) -> None:
    assert resolve_kv(kv, kv_k, kv_v, default) == spec


@pytest.mark.parametrize("word", ["f32", "f16", "bf16", "q8_0", "q4_0"])
def test_the_words_of_llama_cpp_are_sides(word: str) -> None:
    assert resolve_kv(None, word, word, "kvrt4") == word


@pytest.mark.parametrize(
    ("kv", "kv_k", "kv_v", "kind", "start"),
    [
        ("kvrt5", None, None, UsageError, "--kv: unknown cache format 'kvrt5'"),
        ("kvrt5", "f16", None, UsageError, "--kv: unknown cache format 'kvrt5'"),
        ("f16", "f61", None, UsageError, "--kv-k: cache format 'k=f61': unknown codec"),
        (None, None, "q5_0", UsageError, "--kv-v: cache format 'v=q5_0': unknown codec"),
        (None, None, "f16:page", UnsupportedError, "--kv-v: cache format 'v=f16:page': page is"),
        (None, "kvrt4", None, UsageError, "--kv-k: kvrt4 is a format of keys and values"),
        (None, "f16,v=f16", None, UsageError, "--kv-k: cache format 'k=f16,v=f16': unknown codec"),
        (None, "", None, UsageError, "--kv-k: cache format 'k=': unknown codec ''"),
        ("", None, None, UsageError, "--kv: unknown cache format ''"),
    ],
)
def test_an_error_names_the_option(
    kv: str | None, kv_k: str | None, kv_v: str | None, kind: type[KvrtError], start: str
) -> None:
    with pytest.raises(UsageError) as caught:
        resolve_kv(kv, kv_k, kv_v, "f16")
    assert type(caught.value) is kind
    assert str(caught.value).startswith(start)


# --- several formats ---


@pytest.mark.parametrize(
    ("text", "formats"),
    [
        ("f16", ["f16"]),
        ("f16,kvrt2", ["f16", "kvrt2"]),
        (" f16 , kvrt2 ", ["f16", "kvrt2"]),
        ("kvrt2,window=256", ["kvrt2,window=256"]),
        ("kvquant2:1%,sink=4,kivi2", ["kvquant2:1%,sink=4", "kivi2"]),
        ("k=int4:channel:g64,v=int4:token:g64,sink=4,f16",
         ["k=int4:channel:g64,v=int4:token:g64,sink=4", "f16"]),
        ("f16,k=q8_0,v=q4_0", ["f16", "k=q8_0,v=q4_0"]),  # a name has both sides
        ("v=q8_0, k = q4_0,v=f16,k=f16", ["v=q8_0, k = q4_0", "v=f16,k=f16"]),
        ("k=q8_0,sink=4,v=q4_0", ["k=q8_0,sink=4,v=q4_0"]),
        # What follows layers[...]= is a format of its own.
        ("f16,kvrt2,layers[0-1]=f16", ["f16", "kvrt2,layers[0-1]=f16"]),
        ("kvrt2,layers[0]=f16,layers [ 1 ] = f8,f16", ["kvrt2,layers[0]=f16,layers [ 1 ] = f8",
                                                     "f16"]),
        ("k=f16,v=f16,layers[0]=k=q8_0,v=q4_0", ["k=f16,v=f16,layers[0]=k=q8_0,v=q4_0"]),
        ("f16,layers[0]= v = q8_0,k=q4_0,k=f8,v=f8",
         ["f16,layers[0]= v = q8_0,k=q4_0", "k=f8,v=f8"]),
        ("f16,layers[0]=f8,k=q8_0,v=q8_0", ["f16,layers[0]=f8", "k=q8_0,v=q8_0"]),
        # Mistakes stay beside what they were made in, for the message.
        ("f16,sink", ["f16,sink"]),
        ("f16,sink=1,sink=2", ["f16,sink=1,sink=2"]),
        ("f16,layers[0]", ["f16,layers[0]"]),
        ("f16,widow=3", ["f16,widow=3"]),
        ("window=3,f16", ["window=3", "f16"]),
        ("k=f16,f16", ["k=f16", "f16"]),
        ("f16,,f8", ["f16", "", "f8"]),
        (",", ["", ""]),
        ("", [""]),
    ],
)  # fmt: skip
def test_lists_of_formats(text: str, formats: list[str]) -> None:
    assert split_formats(text) == formats


def test_every_preset_is_one_format_in_a_list() -> None:
    assert split_formats(",".join(PRESETS)) == list(PRESETS)
    spelled = [
        f"k={spec.k},v={spec.v},sink={spec.sink},window={spec.window},layers[0-1]=f16"
        for spec in PRESETS.values()
    ]
    assert split_formats(",".join(spelled)) == spelled


@pytest.mark.parametrize(
    ("kv", "kv_k", "kv_v", "names"),
    [
        ((), None, None, ["f16", "kvrt4"]),
        (("kvrt2", "f16, q8_0"), None, None, ["kvrt2", "f16", "q8_0"]),
        (("k=q8_0,v=q8_0",), None, None, ["k=q8_0,v=q8_0"]),  # as it was written
        # Sides without --kv are those of f16; every pair of two lists, keys outside.
        ((), "q8_0", None, ["k=q8_0,v=f16"]),
        ((), "q8_0,f16", "q4_0, f16", ["k=q8_0,v=q4_0", "k=q8_0,v=f16", "k=f16,v=q4_0", "f16"]),
        (("kvrt4,kvrt2",), None, "int3:token:g64:had",
         ["k=int4:channel:g64:had,v=int3:token:g64:had,sink=4,window=128", "kvrt3"]),
        (("f16,f8",), "q8_0,q4_0", None,
         ["k=q8_0,v=f16", "k=q4_0,v=f16", "k=q8_0,v=e4m3", "k=q4_0,v=e4m3"]),
    ],
)  # fmt: skip
def test_formats(
    kv: tuple[str, ...], kv_k: str | None, kv_v: str | None, names: list[str], capsys: Any
) -> None:
    formats = resolve_formats(kv, kv_k, kv_v, ("f16", "kvrt4"))
    assert [asked.name for asked in formats] == names
    assert [asked.spec for asked in formats] == [KVSpec.parse(name) for name in names]
    assert capsys.readouterr().err == ""


def test_a_format_named_twice_is_kept_once(capsys: Any) -> None:
    formats = resolve_formats(("f16,q8_0", "k=q8_0,v=q8_0,f16"), None, None, ())
    assert [asked.name for asked in formats] == ["f16", "q8_0"]
    assert capsys.readouterr().err == (
        "kvrt: cache format q8_0 is named twice (k=q8_0,v=q8_0 is q8_0); it is measured once\n"
        "kvrt: cache format f16 is named twice; it is measured once\n"
    )
    assert [asked.name for asked in resolve_formats(("f16",), "f16,f16", None, ())] == ["f16"]


@pytest.mark.parametrize(
    ("kv", "kv_k", "start"),
    [
        ("f16,f17", None, "--kv: unknown cache format 'f17', did you mean f16"),
        ("f16,", None, "--kv: unknown cache format ''"),
        ("k=f16,f16", None, "--kv: cache format 'k=f16': v=SIDE is missing"),
        ("f16,sink", None, "--kv: cache format 'f16,sink': sink has no value"),
        ("f16,q8_0,layers[0]", None, "--kv: cache format 'layers[0]': expected layers[A-B]"),
        ("int4:token", None, "--kv: unknown cache format 'int4:token': this is one side"),
        ("f16", "q8_0,", "--kv-k: cache format 'k=': unknown codec ''"),
        ("f16", "q8_0,v=f16", "--kv-k: cache format 'k=v=f16': unknown codec"),
    ],
)
def test_an_error_in_a_list_names_its_option(kv: str, kv_k: str | None, start: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve_formats((kv,), kv_k, None, ())
    assert str(caught.value).startswith(start)


def test_only_default_formats_may_be_left_out(capsys: Any) -> None:
    shape = Geometry(2, 2, 80)
    formats = [Format(name, KVSpec.parse(name)) for name in ("f16", "kvrt4", "bf16")]
    fitting = fitting_formats(formats, shape, 8192, chosen=False)
    assert [asked.name for asked in fitting] == ["f16", "bf16"]
    said = capsys.readouterr().err
    assert said.startswith("kvrt: the default cache format kvrt4 does not fit this model (")
    assert said.count("\n") == 1
    with pytest.raises(UnsupportedError, match="v=int4:token:g64:had"):
        fitting_formats(formats, shape, 8192, chosen=True)
    assert fitting_formats(formats[:1], shape, 8192, chosen=True) == formats[:1]


# --- what a command gets ---


class Loaded(Exception):
    """Raised in place of loading a model."""


@dataclass
class Loads:
    """What `kvrt.load` was called with."""

    model: str | None = None
    options: dict[str, Any] | None = None

    def __call__(self, model: str, **options: Any) -> None:
        self.model, self.options = model, options
        raise Loaded

    def command(self, *args: str) -> dict[str, Any]:
        """Run a command line up to the loading of its model."""
        self.options = None
        assert run(args) == 1  # by Loaded
        assert self.options is not None
        return self.options


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Loads:
    spy = Loads()
    monkeypatch.setattr("kvrt.generate.load", spy)
    return spy


def model_of(folder: Path, head_dim: int, max_context: int = 256) -> str:
    write_tiny_model(folder / "m", head_dim=head_dim, max_context=max_context)
    return str(folder / "m")


@pytest.fixture
def model(tmp_path: Path) -> str:
    return model_of(tmp_path, head_dim=64)


@pytest.mark.parametrize(
    ("flags", "spec"),
    [
        (["--kv", "kivi2"], "kivi2"),
        (["--kv=k=q8_0,v=f16"], "k=q8_0,v=f16"),
        (["-ctk", "q8_0", "-ctv", "q4_0"], "k=q8_0,v=q4_0"),
        (["-ctk=q8_0"], "k=q8_0,v=f16"),
        (["--cache-type-k", "bf16", "--cache-type-v", "f32"], "k=bf16,v=f32"),
        (["--kv-k", "q8_0", "--kv-v", "f8"], None),
        (["--kv-v", "int4:token:g64", "--kv", "kvrt4"],
         "k=int4:channel:g64:had,v=int4:token:g64,sink=4,window=128"),
        (["-c", "64", "-ctv", "q8_0", "-t", "1"], "k=f16,v=q8_0"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("command", ["chat", "generate"])
def test_the_flags_reach_load(
    command: str, flags: list[str], spec: str | None, loads: Loads, model: str, capsys: Any
) -> None:
    if spec is None:  # a preset is no side
        assert run([command, "-m", model, "-p", "a", *flags]) == 2
        assert "--kv-v: f8 is a format of keys and values" in capsys.readouterr().err
        return
    assert loads.command(command, "-m", model, "-p", "a", *flags)["kv"] == spec


@pytest.mark.parametrize("flag", ["--kv", "--kv-k", "-ctk", "--kv-v", "-ctv", "--cache-type-v"])
@pytest.mark.parametrize("command", ["chat", "generate"])
def test_an_unknown_format_is_refused_before_anything_is_loaded(
    command: str, flag: str, loads: Loads, capsys: Any
) -> None:
    assert run([command, "-m", "/nowhere/model", "-p", "a", flag, "int99"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "int99" in err and "/nowhere" not in err
    assert loads.options is None


def test_the_defaults(loads: Loads, model: str, capsys: Any) -> None:
    assert loads.command("generate", "-m", model, "-p", "a")["kv"] == "f16"
    assert loads.command("chat", "-m", model, "-p", "a")["kv"] == "kvrt4"
    assert "does not fit" not in capsys.readouterr().err


@pytest.mark.parametrize(("head_dim", "context", "why"), [(80, 256, "80"), (64, 131, "132")])
def test_a_default_that_does_not_fit_is_f16_and_says_so(
    head_dim: int,
    context: int,
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    model = model_of(tmp_path, head_dim, context)
    monkeypatch.setattr("kvrt.generate.load", lambda name, **options: options["kv"])
    choice = ModelChoice(model, "kvrt4", None, "cpu", None, kv_is_default=True)
    assert open_model(choice) == "f16"
    said = capsys.readouterr().err
    assert said.startswith("kvrt: the default cache format kvrt4 does not fit this model (")
    assert why in said and said.count("\n") == 1
    # What a person asked for is never replaced.
    assert open_model(replace(choice, kv_is_default=False)) == "kvrt4"
    assert capsys.readouterr().err == ""


def test_a_failed_load_says_only_why(loads: Loads, tmp_path: Path, capsys: Any) -> None:
    loads.command("chat", "-m", model_of(tmp_path, head_dim=80), "-p", "a")
    assert "does not fit" not in capsys.readouterr().err


def test_only_a_format_that_no_flag_names_is_a_default(monkeypatch: Any, capsys: Any) -> None:
    seen: list[ModelChoice] = []

    def stop(choice: ModelChoice, remark: object) -> None:
        seen.append(choice)
        raise Loaded

    monkeypatch.setattr("kvrt.cli.chat.open_model", stop)
    for flags in ([], ["--kv", "kvrt4"], ["-ctk", "f16"], ["-ctv", "f16"]):
        assert run(["chat", "-m", "m", "-p", "a", *flags]) == 1
    assert [(choice.kv, choice.kv_is_default) for choice in seen] == [
        ("kvrt4", True), ("kvrt4", False), ("f16", False), ("f16", False),
    ]  # fmt: skip


def test_a_calibration_reaches_load(loads: Loads, model: str, tmp_path: Path) -> None:
    args = ["generate", "-m", model, "-p", "a", "--kv", "kvquant3"]
    assert loads.command(*args)["calibration"] is None
    file = str(tmp_path / "c.safetensors")
    assert loads.command(*args, "--calibration", file)["calibration"] == file


def test_an_impossible_calibration_path_is_refused(loads: Loads, capsys: Any) -> None:
    assert run(["generate", "-m", "/nowhere/model", "-p", "a", "--calibration", ""]) == 2
    assert "--calibration: the path is empty" in capsys.readouterr().err
    assert loads.options is None


def test_the_help_says_the_default_of_each_command(capsys: Any) -> None:
    for command, default in (("chat", "kvrt4"), ("generate", "f16")):
        assert run([command, "--help"]) == 0
        assert f"[default: {default}]" in " ".join(capsys.readouterr().out.split())


# --- info ---


def test_info_prices_every_preset(tmp_path: Path, capsys: Any) -> None:
    model = model_of(tmp_path, head_dim=64)
    asked = [flag for name in PRESETS for flag in ("--kv", name)]
    assert run(["info", model, *asked, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["kv"]
    with_codebooks = [row["spec"] for row in rows if row.pop("smaller_from", None)]
    assert with_codebooks == ["vq2", "vq1.5", "vq1", "vqkv"]
    shape = Geometry(2, 2, 64)
    assert rows == [
        {
            "spec": name,
            "bits_per_element": bits_per_element(shape, spec),
            "bytes_per_token": bytes_per_token(shape, spec),
            "fixed_bytes": fixed_bytes(shape, spec),
        }
        for name, spec in PRESETS.items()
    ]
    assert run(["info", model, "--kv", "v=f16, k=int4:g64:channel"]) == 0
    assert "k=int4:channel:g64,v=f16 " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("kvrt5", "--kv: unknown cache format 'kvrt5'"),
        ("kvrt4", "v=int4:token:g64:had"),
        ("q8_0", "k=q8_0"),
        ("f16,layers[2]=f8", "layers[2]"),
    ],
)
def test_info_refuses_what_does_not_fit(spec: str, words: str, tmp_path: Path, capsys: Any) -> None:
    model = model_of(tmp_path, head_dim=80)
    assert run(["info", model, "--kv", "f16", "--kv", spec]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert words in err


def test_info_counts_what_a_bias_of_the_keys_costs(tmp_path: Path, ops: CpuOps) -> None:
    """A packed cache leaves the bias out of keys and then holds tables of angles."""
    write_tiny_model(tmp_path, "qwen2")
    facts, _ = model_facts(str(tmp_path), [KVSpec.parse("f8")])
    config = ModelConfig.from_dir(tmp_path)
    rotary = Rotary(config.rope.inverse_frequencies(config.head_dim))
    shape = (config.num_kv_heads, config.head_dim)
    biases = [ops.to_device(np.ones(shape, np.float32)) for _ in range(config.num_layers)]
    store = KVStore(
        cache_geometry(config), KVSpec.parse("f8"), ops, 64, rotary=rotary, key_bias=biases
    )
    assert facts["kv"][0]["fixed_bytes"] == store.stats().bytes
    assert store.view(0).settings[TURNS]  # they are there


def test_a_spec_is_a_text_that_load_takes() -> None:
    text = resolve_kv("kvrt4,layers[0-1]=f16", "f16:page", None, "f16")
    assert str(KVSpec.parse(text)) == text
