"""The verbs quantize, eval and synthesize: from a command line to bundles, tables and errors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from engine.bundle import Bundle
from engine.export.exporter import import_checkpoint
from server.cli.eval import EvalOptions, legend, run_evaluation
from server.cli.main import run
from server.cli.quantize import destination
from server.model_source import find_bundle, open_decoder, source_file, source_of
from server.model_store import ModelStore
from server.sources.errors import BadModelName, BadSource, UnknownModel
from server.token_windows import read_text, token_windows
from tests.engine.gguf_files import write_tiny_llama_gguf
from tests.model_configs import make_config

TEXT = Path(__file__).parent.parent / "data" / "night_ferry.txt"
QUICK = ["--threads", "1", "--text", str(TEXT)]


@pytest.fixture(scope="module")
def cache(kernels: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with a tiny model and its file."""
    root = tmp_path_factory.mktemp("cache")
    source = write_tiny_llama_gguf(root / "tiny.gguf", quant="F32")
    import_checkpoint(source, root / "hexlm" / "models" / "tiny", "tiny", lambda done, total: None)
    return root


@pytest.fixture
def store(cache: Path, monkeypatch: pytest.MonkeyPatch) -> ModelStore:
    """The one that the verbs find. Kernels stay where all tests have them."""
    store = ModelStore(cache / "hexlm")
    monkeypatch.setattr("server.model_store.ModelStore", lambda: store)
    return store


def test_a_quantized_model_is_one_that_serve_takes(
    store: ModelStore, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["quantize", "tiny", "tiny-int4", "--format", "int4-awq", *QUICK]) == 0
    output = capsys.readouterr().out
    assert "4 4 4 4" in output
    assert "tiny-int4 is ready: 5.12 bits per weight" in output
    bundle = Bundle.open(store.resolve("tiny-int4"))
    assert bundle.weight_format == "int4"
    assert sorted(path.name for path in store.models_dir.iterdir() if path.is_dir()) == [
        "tiny",
        "tiny-int4",
    ]
    assert run(["quantize", "tiny", "tiny-int4"]) == 1
    assert "replace it with --force" in capsys.readouterr().err


def test_a_path_is_a_folder_of_its_own(store: ModelStore, tmp_path: Path) -> None:
    out = tmp_path / "model"
    assert run(["quantize", "tiny", str(out), "--format", "int8", *QUICK]) == 0
    assert Bundle.open(out).weight_format == "int8"
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["model"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--format", "int3"], "unknown format 'int3': use one of int8, int4, int4-awq, mixed"),
        (["--block", "48"], "a block of 48 weights: use one of 32, 64, 128"),
        (["--format", "mixed", "--bits", "4"], "already take 5.12"),
        (["--text", "missing.txt"], "missing.txt"),
    ],
)
def test_what_cannot_be_quantized_is_said_in_one_line(
    arguments: list[str],
    message: str,
    store: ModelStore,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["quantize", "tiny", "other", *arguments]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (store.models_dir / "other").exists()


def test_eval_compares_weights_and_kv_formats(
    store: ModelStore, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "eval tiny --weights int4 --kv f32,int8 --window 64 --max-tokens 128 --threads 1 --json"
    assert run(line.split()) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["num_tokens"] == 128
    rows = [(one["model"], one["weights"], one["kv"]) for one in document["models"]]
    assert rows == [
        ("tiny", "f32", "f32"),
        ("tiny", "int8", "f32"),
        ("tiny", "int8", "int8"),
        ("int4", "int4", "f32"),
        ("int4", "int4", "int8"),
    ]
    reference, *others = document["models"]
    assert reference["mean_kl"] is None
    eights, fours = others[0]["mean_kl"], others[2]["mean_kl"]
    assert 0 < eights < fours / 3
    assert others[0]["kv_bytes_per_token"] > 3 * others[1]["kv_bytes_per_token"]


def test_eval_against_the_model_itself_shows_the_kv_format_alone(store: ModelStore) -> None:
    options = EvalOptions("same", (), ("f32", "int4"), None, 48, 96)
    figures, num_tokens = run_evaluation("tiny", options, threads=1)
    assert num_tokens == 96
    _, same, rounded = figures
    assert same.divergence is not None and rounded.divergence is not None
    assert same.divergence.mean_kl == 0 < rounded.divergence.mean_kl
    assert "against tiny with int8 weights and f32 keys" in legend(figures[0], num_tokens)


def test_eval_prints_a_table(store: ModelStore, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["eval", "tiny", "--window", "32", "--max-tokens", "32", "--threads", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["model", "weights", "MB"]
    assert "reference" in lines[1]
    assert lines[2].split()[:2] == ["tiny", "int8"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("eval tiny --kv int3", "unknown KV format 'int3'; use some of f32"),
        ("eval nothing", "unknown model 'nothing'"),
        ("eval tiny --reference nothing", "unknown model 'nothing'"),
    ],
)
def test_eval_errors(
    line: str, message: str, store: ModelStore, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(line.split()) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("synthesize --like gpt-5", "unknown shape 'gpt-5'; use one of phi-3-mini"),
        ("synthesize --like phi-3-mini --quant int3", "unknown format 'int3'; use int4 or int8"),
        ("synthesize --like phi-3-mini --out tiny", "is there; choose another name"),
    ],
)
def test_synthesize_errors(
    line: str, message: str, store: ModelStore, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(line.split()) == 1
    assert message in capsys.readouterr().err


class TestSources:
    def test_a_bundle_stands_for_the_file_it_was_made_of(
        self, store: ModelStore, cache: Path
    ) -> None:
        def progress(task: str, done: int, total: int) -> None:
            pass

        file = cache / "tiny.gguf"
        assert source_file(store, "tiny", progress) == file
        assert source_file(store, str(store.models_dir / "tiny"), progress) == file
        assert source_file(store, str(file), progress) == file
        with pytest.raises(UnknownModel, match="unknown model 'huge'"):
            source_file(store, "huge", progress)

    def test_a_file_that_is_gone_is_said(self, store: ModelStore, tmp_path: Path) -> None:
        source = write_tiny_llama_gguf(tmp_path / "gone.gguf")
        bundle = import_checkpoint(source, tmp_path / "model", "model", lambda done, total: None)
        source.unlink()
        with pytest.raises(BadSource, match="is gone; give the file itself"):
            source_of(bundle)

    def test_what_is_no_bundle_is_none(self, store: ModelStore, tmp_path: Path) -> None:
        assert find_bundle(store, str(tmp_path)) is None

    def test_names_and_paths_of_what_is_made(self, tmp_path: Path) -> None:
        assert destination("model", tmp_path) == tmp_path / "model"
        assert destination("other/model", tmp_path) == Path("other/model")
        with pytest.raises(BadModelName):
            destination("..", tmp_path)


class TestWindows:
    def test_a_text_is_cut_into_windows_of_one_length(self, cache: Path) -> None:
        tokenizer = open_decoder(cache / "tiny.gguf").tokenizer_json
        config = make_config(context_length=512)
        text = "the cat sat on the mat " * 20
        whole = token_windows(tokenizer, config, text, 10_000, 9)[0]
        windows = token_windows(tokenizer, config, text, 32, 3)
        assert windows.shape == (3, 32)
        assert windows.dtype == np.int32
        np.testing.assert_array_equal(windows.reshape(-1), whole[:96])

    def test_each_window_begins_as_the_model_wants_it(self, cache: Path) -> None:
        tokenizer = open_decoder(cache / "tiny.gguf").tokenizer_json
        config = make_config(bos_token_id=1, add_bos=True)
        windows = token_windows(tokenizer, config, "abcdefgh " * 20, 32, 4)
        assert (windows[:, 0] == 1).all()
        assert not (windows[:, 1:] == 1).any()

    def test_a_text_that_is_too_short_is_refused(self, cache: Path) -> None:
        from server.cli.errors import CliError

        tokenizer = open_decoder(cache / "tiny.gguf").tokenizer_json
        with pytest.raises(CliError, match="the text has 3 tokens; give one of at least 16"):
            token_windows(tokenizer, make_config(), "xyz", 64, 1)

    def test_the_text_that_comes_with_hexlm_is_long_enough(self) -> None:
        assert len(read_text(None)) > 7000
