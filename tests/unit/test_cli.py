"""The command line without a terminal: streams, exit codes, options, every command's output."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest

from kvrt.backends import get_ops
from kvrt.cli.console import PromptProgress, format_bytes, wants_colour
from kvrt.cli.main import cli, run
from kvrt.errors import ContextFullError, KvrtError, OutOfMemoryError, UsageError
from kvrt.paths import kernels_dir
from tests.helpers.tiny_model import write_tiny_model

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_model(folder, tokenizer=True)
    get_ops("cpu")  # compiles the kernels where that was not done yet, and says so on stderr
    return str(folder)


def kvrt(*args: str, env: dict[str, str] | None = None, **options) -> subprocess.CompletedProcess:
    """Run the real command in a process of its own; bytes in, bytes out."""
    command = [sys.executable, "-m", "kvrt", *args]
    options = {"stdin": subprocess.DEVNULL, **options} if "input" not in options else options
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, timeout=120, env={**os.environ, **(env or {})},
        **options,
    )  # fmt: skip


def one_line(err: str) -> str:
    """The only line of stderr, without its newline."""
    assert err.endswith("\n")
    assert err.count("\n") == 1, err
    return err[:-1]


# --- the group ---


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == "kvrt 0.1.0\n"
    for args in (["--help"], ["-h"], []):
        assert run(args) == 0
        out, err = capsys.readouterr()
        for name in ("chat", "generate", "info", "pull", "convert", "doctor"):
            assert f"\n  {name} " in out
        assert err == ""


@pytest.mark.parametrize("name", ["chat", "generate", "info", "pull", "convert", "doctor"])
def test_every_command_takes_the_common_options(name: str, capsys) -> None:
    assert run([name, "--help"]) == 0
    out = capsys.readouterr().out
    for word in ("--device", "-t, --threads", "-v, --verbose", "--debug"):
        assert word in out


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from kvrt.cli.main import run; run(['--help']); "
        "print([m for m in ('numpy', 'numba', 'rich', 'tokenizers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.endswith("[]\n")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["chta"], "did you mean 'chat'"),
        (["xyzzy"], "no such command 'xyzzy'"),
        (["generate", "--tmep", "1"], "--tmep"),
        (["generate", "--temp", "-1"], "'--temp'"),
        (["generate", "--temp", "nan"], "'--temp'"),
        (["generate", "--temp", "hot"], "'--temp'"),
        (["generate", "--top-k", "1.5"], "'--top-k'"),
        (["generate", "--top-p", "1.5"], "'--top-p'"),
        (["generate", "--min-p", "-0.1"], "'--min-p'"),
        (["generate", "--repeat-penalty", "0"], "'--repeat-penalty'"),
        (["generate", "--repeat-last-n", "-2"], "'--repeat-last-n'"),
        (["generate", "--presence-penalty", "inf"], "'--presence-penalty'"),
        (["generate", "--logit-bias", "5"], "'--logit-bias'"),
        (["generate", "--logit-bias", "5+x"], "'--logit-bias'"),
        (["generate", "-n", "-2"], "'--predict'"),
        (["generate", "-c", "-1"], "'--ctx-size'"),
        (["generate", "-t", "0"], "'--threads'"),
        (["generate", "-s", "-2"], "'--seed'"),
        (["generate", "-p"], "-p"),
        (["generate", "extra"], "extra"),
        (["generate", "-p", "a", "-f", "b"], "-p and -f"),
        (["generate", "-m", "/nowhere/model", "-p", ""], "empty"),
        (["generate", "-f", "/nowhere/file"], "/nowhere/file"),
        (["generate", "-m", "/nowhere/model", "-p", "a"], "/nowhere/model"),
        (["chat", "-m", "/nowhere/model", "-p", "a"], "/nowhere/model"),
        (["chat", "-m", "/nowhere/model", "-p", " "], "empty"),
        (["chat", "-m", "x", "-p", "a", "--session", "/nowhere/x.json"], "--session"),
        (["info"], "MODEL"),
        (["info", "/nowhere/model"], "/nowhere/model"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_2(args: list[str], said: str, capsys) -> None:
    assert run(args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in one_line(err)
    assert err.startswith("kvrt: error: ")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--kv", "int99"], "int99"),
        (["--device", "tpu"], "tpu"),
        (["-c", "257"], "256"),
        (["-l", "9999+1"], "9999"),
    ],
)
def test_a_request_the_model_cannot_meet_is_exit_2(model, args, said, capsys) -> None:
    assert run(["generate", "-m", model, "-p", "a", *args]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in one_line(err)


# --- errors become exit codes ---


def group_raising(error: BaseException) -> click.Group:
    group = click.Group("kvrt", params=list(cli.params))

    @group.command("boom")
    def boom() -> None:
        raise error

    return group


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (KvrtError("it\nfailed"), 1, "kvrt: error: it failed"),
        (UsageError("wrong"), 2, "kvrt: error: wrong"),
        (ContextFullError("full"), 2, "kvrt: error: full"),
        (click.BadParameter("bad"), 2, "kvrt: error: Invalid value: bad"),
        (RuntimeError("odd"), 1, "kvrt: error: internal error: RuntimeError: odd; --debug"),
        (MemoryError(), 1, "kvrt: error: out of memory"),
        (MemoryError("7 bytes"), 1, "kvrt: error: out of memory: 7 bytes"),
        (OutOfMemoryError("cuda:0 is full"), 1, "kvrt: error: cuda:0 is full"),
        (OSError(errno.EIO, "I/O"), 1, "kvrt: error: internal error: OSError: [Errno 5] I/O"),
    ],
)
def test_errors_are_one_line(error, code, line, capsys) -> None:
    assert run(["boom"], group_raising(error)) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert one_line(err).startswith(line)


def test_an_interruption_is_130_without_a_word(capsys) -> None:
    assert run(["boom"], group_raising(KeyboardInterrupt())) == 130
    assert capsys.readouterr() == ("", "")


def test_debug_shows_the_traceback(capsys) -> None:
    assert run(["--debug", "boom"], group_raising(KvrtError("failed"))) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.endswith("kvrt: error: failed\n")


def test_debug_works_after_the_command_too(capsys) -> None:
    assert run(["info", "--debug", "/nowhere/model"]) == 2
    assert "Traceback" in capsys.readouterr().err


# --- generate ---


def test_generate_writes_the_continuation_alone(model: str) -> None:
    done = kvrt("generate", "-m", model, "-p", "abc", "-n", "12", "--temp", "0")
    assert done.returncode == 0
    assert done.stderr == b""
    again = kvrt("generate", "-m", model, "-p", "abc", "-n", "12", "--temp", "0", "--json")
    data = json.loads(again.stdout)
    assert done.stdout.decode("utf-8") == data["text"]
    assert data["text"]


def test_generate_json_is_one_object_of_the_fixed_fields(model: str, capsys) -> None:
    args = ["generate", "-m", model, "-p", "abc", "-n", "5", "--temp", "0", "--json"]
    assert run(args) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    data = json.loads(out)
    assert list(data) == [
        "text", "token_ids", "prompt_tokens", "prefill_s", "decode_s", "tokens_per_s",
        "finish_reason", "kv", "device", "cache_bytes", "peak_bytes",
    ]  # fmt: skip
    assert len(data["token_ids"]) == 5
    assert data["prompt_tokens"] == 3
    assert data["finish_reason"] == "length"
    assert data["kv"] == "f16"
    assert data["cache_bytes"] > 0
    assert data["tokens_per_s"] == pytest.approx(5 / data["decode_s"])


def test_a_seed_repeats_and_zero_tokens_are_legal(model: str, capsys) -> None:
    texts = []
    for seed in ("7", "7", "8"):
        assert run(["generate", "-m", model, "-p", "abc", "-n", "20", "-s", seed]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    assert run(["generate", "-m", model, "-p", "abc", "-n", "0"]) == 0
    assert capsys.readouterr().out == ""


def test_a_logit_bias_rules_the_draw(model: str, capsys) -> None:
    args = ["generate", "-m", model, "-p", "abc", "-n", "3", "--temp", "0", "-l", "65+1000"]
    assert run(args) == 0
    assert capsys.readouterr().out == "AAA"


def test_flags_change_the_models_own_sampling_and_leave_the_rest(tmp_path, capsys) -> None:
    folder = tmp_path / "m"
    write_tiny_model(folder, tokenizer=True)
    recommend = folder / "generation_config.json"
    args = ["-m", str(folder), "-p", "abc", "-n", "12"]

    def texts(command: str, *flags: str) -> set[str]:
        found = set()
        for seed in ("1", "2", "3"):
            assert run([command, *args, "-s", seed, *flags]) == 0
            found.add(capsys.readouterr().out)
        return found

    for command in ("generate", "chat"):
        recommend.write_text('{"do_sample": false}', encoding="utf-8")
        assert len(texts(command)) == 3  # llama.cpp's temperature 0.8
        greedy = texts(command, "--temp", "0")
        assert len(greedy) == 1
        recommend.write_text('{"temperature": 50.0, "top_k": 1}', encoding="utf-8")
        assert texts(command) == greedy
        assert texts(command, "--temp", "3") == greedy  # the model's top-k stays
        assert len(texts(command, "--top-k", "0", "--min-p", "0")) == 3
        recommend.write_text('{"temperature": 0}', encoding="utf-8")
        assert texts(command) == greedy
        assert len(texts(command, "--temp", "0.8")) == 3  # also back to kvrt's own default


def test_the_help_says_whose_default_it_is(capsys) -> None:
    for command in ("generate", "chat"):
        assert run([command, "--help"]) == 0
        said = " ".join(capsys.readouterr().out.split())
        for default in ("0.8", "40", "0.95", "0.05", "1.0"):
            assert f"[default: the model's, else {default}]" in said
        assert "look back at. [default: 64]" in said


def test_generate_until_the_context_is_full(model: str, capsys) -> None:
    args = ["generate", "-m", model, "-p", "abc", "-n", "-1", "-c", "33", "-l", "65+1000"]
    assert run([*args, "-l", "66+1000", "-s", "1"]) == 0
    out, err = capsys.readouterr()
    assert len(out) == 31  # 33 - 3, and the one drawn from the last position
    assert set(out) == {"A", "B"}
    assert "context of 33 tokens is full" in one_line(err)


def test_a_prompt_longer_than_the_context_is_exit_2(model: str, capsys) -> None:
    assert run(["generate", "-m", model, "-p", "a" * 34, "-c", "33"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "34 tokens" in one_line(err)


def test_verbose_says_speed_and_memory_on_stderr(model: str, capsys) -> None:
    assert run(["generate", "-m", model, "-p", "abc", "-n", "4", "--temp", "0", "-v"]) == 0
    err = capsys.readouterr().err
    assert "prompt: 3 tokens" in err
    assert "answer: 4 tokens" in err
    assert "peak" in err


def test_the_prompt_comes_from_a_file_or_stdin_less_one_newline(model: str, tmp_path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"\xef\xbb\xbfab\n\n")
    args = ["generate", "-m", model, "-n", "2", "--json"]
    from_file = kvrt(*args, "-f", str(file))
    assert json.loads(from_file.stdout)["prompt_tokens"] == 3
    from_stdin = kvrt(*args, input=b"ab\r\n")
    assert json.loads(from_stdin.stdout)["prompt_tokens"] == 2


def test_stdin_that_is_not_utf8_is_one_line_with_the_place(model: str) -> None:
    done = kvrt("generate", "-m", model, input=b"good \xff bad")
    assert done.returncode == 1
    assert done.stdout == b""
    said = one_line(done.stderr.decode())
    assert "stdin is not valid UTF-8" in said
    assert "0xff at position 5" in said


def test_an_argument_that_is_not_utf8_is_one_line(model: str) -> None:
    if sys.platform == "win32":
        pytest.skip("arguments are Unicode on Windows")
    done = kvrt("generate", "-m", model, "-p", b"a\xff")
    assert done.returncode == 1
    assert "-p is not valid UTF-8" in one_line(done.stderr.decode())


def test_empty_stdin(model: str) -> None:
    done = kvrt("generate", "-m", model)
    assert done.returncode == 2
    assert "the prompt is empty" in one_line(done.stderr.decode())
    done = kvrt("chat", "-m", model)
    assert done.returncode == 0
    assert done.stdout == b""


def test_an_unreadable_prompt_file_is_exit_2(tmp_path, capsys) -> None:
    assert run(["generate", "-f", str(tmp_path)]) == 2  # a folder
    assert str(tmp_path) in one_line(capsys.readouterr().err)


def test_output_is_utf8_under_any_locale(model: str) -> None:
    env = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    # Half characters become U+FFFD, which no C locale could write.
    args = ["generate", "-m", model, "-p", "abc", "-n", "2", "--temp", "0", "-l", "195+1000"]
    done = kvrt(*args, env=env)
    assert done.returncode == 0
    assert done.stdout == "\ufffd\ufffd".encode()


def test_a_reader_who_leaves_ends_it_quietly(model: str) -> None:
    args = [sys.executable, "-m", "kvrt", "generate", "-m", model, "-p", "abc", "-n", "200"]
    process = subprocess.Popen(
        [*args, "-l", "65+1000"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.read(1) == b"A"
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    assert process.wait(60) == 1
    assert err == b""


def test_a_stderr_whose_reader_has_left_is_survived() -> None:
    args = [sys.executable, "-m", "kvrt", "info", "/nowhere/model"]
    process = subprocess.Popen(args, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stderr.close()
    assert process.stdout.read() == b""
    process.stdout.close()
    assert process.wait(60) == 1  # not the interpreter's 120 for a failed flush


def test_a_full_disk_under_stdout_is_one_line(model: str) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    args = [sys.executable, "-m", "kvrt", "info", model]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(args, cwd=ROOT, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1
    assert "cannot write to stdout" in one_line(done.stderr.decode())


def test_a_stdout_closed_from_the_start_is_survived(model: str) -> None:
    if sys.platform == "win32":
        pytest.skip("needs a POSIX shell")
    script = f'"{sys.executable}" -m kvrt info "{model}" >&-'
    done = subprocess.run(["sh", "-c", script], cwd=ROOT, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, b"")


def test_generate_imports_only_what_it_needs(model: str) -> None:
    # jinja2 is needed: the end of a turn, which stops the text, is read off the chat template.
    code = (
        "import sys; from kvrt.cli.main import run; "
        f"run(['generate', '-m', {model!r}, '-p', 'a', '-n', '2']); "
        "heavy = ('prompt_toolkit', 'rich', 'huggingface_hub', 'gguf'); "
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True)
    assert done.stdout.endswith(b"[]\n")


def test_ctrl_c_during_generate_is_130_without_a_traceback(model: str) -> None:
    if sys.platform == "win32":
        pytest.skip("no SIGINT to a child on Windows")
    args = [sys.executable, "-m", "kvrt", "generate", "-m", model, "-p", "abc", "-n", "250"]
    process = subprocess.Popen(
        [*args, "-l", "65+1000"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.read(1) == b"A"
    # A full pipe would block the writer, but 250 bytes never fill one: it is still computing or
    # has just ended.
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode in (130, 0)
    assert err == b""


# --- chat for one answer ---


def test_chat_p_gives_one_answer_and_no_colour(model: str) -> None:
    args = ["-m", model, "-n", "5", "--temp", "0", "-l", "65+1000"]
    done = kvrt("chat", *args, "-p", "hi", "--color")
    assert done.returncode == 0
    assert done.stdout == b"AAAAA\n"
    assert b"\x1b" not in done.stderr
    err = done.stderr.decode()
    for word in ("cache f16", "bits per element", "bytes per token", "context limit 256"):
        assert word in err
    piped = kvrt("chat", *args, input=b"hi\n")
    assert (piped.returncode, piped.stdout) == (0, done.stdout)


def test_chat_takes_a_system_message_and_keeps_a_session(model: str, tmp_path, capsys) -> None:
    session = tmp_path / "s.json"
    args = ["chat", "-m", model, "-n", "3", "-l", "65+1000", "--session", str(session)]
    assert run([*args, "-p", "one", "-sys", "be brief"]) == 0
    assert run([*args, "-p", "two", "-t", "1"]) == 0
    assert capsys.readouterr().out == "AAA\nAAA\n"
    messages = json.loads(session.read_text(encoding="utf-8"))["messages"]
    assert [(m["role"], m["content"]) for m in messages] == [
        ("system", "be brief"),
        ("user", "one"),
        ("assistant", "AAA"),
        ("user", "two"),
        ("assistant", "AAA"),
    ]


def test_a_broken_session_file_is_refused_and_kept(model: str, tmp_path, capsys) -> None:
    session = tmp_path / "s.json"
    session.write_text("{", encoding="utf-8")
    assert run(["chat", "-m", model, "-p", "a", "--session", str(session)]) == 1
    assert "not a saved conversation" in one_line(capsys.readouterr().err)
    assert session.read_text(encoding="utf-8") == "{"


def test_chat_without_a_template_says_what_works(tmp_path, capsys) -> None:
    write_tiny_model(tmp_path / "m", tokenizer=True)
    config = tmp_path / "m" / "tokenizer_config.json"
    data = json.loads(config.read_text(encoding="utf-8"))
    del data["chat_template"]
    config.write_text(json.dumps(data), encoding="utf-8")
    assert run(["chat", "-m", str(tmp_path / "m"), "-p", "a"]) == 2
    assert "kvrt generate" in one_line(capsys.readouterr().err)


def test_a_message_that_does_not_fit_is_exit_2(model: str, capsys) -> None:
    assert run(["chat", "-m", model, "-c", "20", "-p", "a" * 30]) == 2
    assert "context limit of 20" in capsys.readouterr().err


def test_without_m_the_default_model_is_used(model: str, tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "kernels").symlink_to(kernels_dir(), target_is_directory=True)
    monkeypatch.setenv("KVRT_HOME", str(tmp_path))
    shutil.copytree(model, tmp_path / "models" / "smollm2")
    assert run(["generate", "-p", "abc", "-n", "3", "-l", "65+1000"]) == 0
    assert capsys.readouterr() == ("AAA", "")


# --- info and doctor ---


def test_info_json_has_the_fixed_fields(model: str, capsys) -> None:
    assert run(["info", model, "--kv", "f16", "--kv", "f32", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert list(data) == [
        "model_type", "num_layers", "num_heads", "num_kv_heads", "head_dim", "parameters",
        "weight_bytes", "max_context", "kv",
    ]  # fmt: skip
    assert (data["num_layers"], data["num_kv_heads"], data["head_dim"]) == (2, 2, 16)
    assert data["weight_bytes"] == 2 * data["parameters"]
    f16, f32 = data["kv"]
    assert list(f16) == ["spec", "bits_per_element", "bytes_per_token", "fixed_bytes"]
    assert (f16["spec"], f32["spec"]) == ("f16", "f32")
    assert f16["bits_per_element"] == 16.0
    assert f16["bytes_per_token"] == 2 * 2 * 2 * 16 * 2  # layers, K and V, heads, head_dim, bytes
    assert f32["bytes_per_token"] == 2 * f16["bytes_per_token"]


def test_info_for_people(model: str, capsys) -> None:
    assert run(["info", model]) == 0
    out, err = capsys.readouterr()
    assert "4 query, 2 key-value" in out
    assert err == ""


def test_doctor_reports_and_gives_json(capsys) -> None:
    assert run(["doctor", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["ok"] is True
    checks = {check["name"]: check for check in data["checks"]}
    for name in ("kvrt", "python", "numpy", "numba", "cores", "blas", "cache folder"):
        assert checks[name]["detail"]
    assert run(["doctor"]) == 0
    assert "python" in capsys.readouterr().out


def test_doctor_fails_where_nothing_can_be_stored(tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("KVRT_HOME", str(tmp_path / "file" / "home"))
    assert run(["doctor", "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["ok"] is False
    assert [c["ok"] for c in data["checks"] if c["name"] == "cache folder"] == [False]


# --- small parts ---


def test_format_bytes() -> None:
    sizes = [format_bytes(n) for n in (0, 1023, 1024, 1_500_000, 3 << 30, 5 << 40)]
    assert sizes == ["0 B", "1023 B", "1.0 KiB", "1.4 MiB", "3.0 GiB", "5.0 TiB"]


class Terminal:
    def __init__(self, is_terminal: bool = True) -> None:
        self.is_terminal = is_terminal
        self.written = ""

    def isatty(self) -> bool:
        return self.is_terminal

    def write(self, text: str) -> None:
        self.written += text

    def flush(self) -> None: ...


def test_colour_is_for_terminals_alone(monkeypatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert wants_colour(None, Terminal())
    assert wants_colour(True, Terminal())
    assert not wants_colour(False, Terminal())
    assert not wants_colour(True, Terminal(is_terminal=False))
    monkeypatch.setenv("NO_COLOR", "1")
    assert not wants_colour(None, Terminal())
    assert wants_colour(True, Terminal())


def test_prompt_progress_waits_and_goes_away() -> None:
    times = iter([0.0, 0.5, 0.9, 1.0, 1.6])
    terminal = Terminal()
    progress = PromptProgress(terminal, clock=lambda: next(times))
    progress(1, 10)
    progress(2, 10)
    assert terminal.written == ""
    progress(3, 10)
    assert terminal.written == "\rreading the prompt:  30 %"
    progress(3, 10)
    progress.clear()
    assert terminal.written.endswith(" \r")
