"""An embedding model or cross-encoder that is on disk and can be served; the counterpart of
`loadable_model.py`.

Also tells the two kinds apart: `open_loadable` makes of a bundle what it is.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from engine.architectures.encoder import EncoderConfig
from engine.bundle import MANIFEST_FILE, Bundle
from engine.manifest import ModelKind
from server.config import ServerConfig
from server.embedding_entry import EmbeddingEngineSpec, run_embedding_engine
from server.encoder_tokenizer import EncoderTokenizer
from server.engine_process import EngineLauncher, SpawnLauncher
from server.loadable_model import LoadableModel, aliases_of, from_bundle, num_threads

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadableEmbedder:
    """`max_model_len` in tokens, `created` in Unix seconds; the rest as in `ServedEmbedder`."""

    name: str
    launcher: EngineLauncher
    tokenizer: EncoderTokenizer
    config: EncoderConfig
    max_model_len: int
    created: int
    quantization: str = "unknown"
    aliases: tuple[str, ...] = ()


Loadable = LoadableModel | LoadableEmbedder


def open_loadable(folder: Path, config: ServerConfig) -> Loadable:
    """Open a bundle of either kind.

    Raises:
        BundleError: the folder is not a usable bundle.
        ConfigError: the configuration asks for more than the model can do.
    """
    bundle = Bundle.open(folder)
    if bundle.kind is not ModelKind.GENERATION:
        return embedder_from_bundle(bundle, config)
    return from_bundle(folder, config)


def embedder_from_bundle(bundle: Bundle, config: ServerConfig) -> LoadableEmbedder:
    """`engine.max_model_len` shortens texts too, but an encoder is never asked for more than it
    was made for: the setting is meant for the models that write."""
    encoder = bundle.encoder_config
    wanted = config.engine.max_model_len or encoder.context_length
    spec = embedding_spec(bundle.path, config)
    return LoadableEmbedder(
        name=bundle.name,
        launcher=SpawnLauncher(partial(run_embedding_engine, spec=spec), bundle.name),
        tokenizer=EncoderTokenizer.from_file(bundle.tokenizer_path),
        config=encoder,
        max_model_len=min(wanted, encoder.context_length),
        created=int((bundle.path / MANIFEST_FILE).stat().st_mtime),
        quantization=bundle.weight_format,
        aliases=aliases_of(bundle.name, config.models.aliases),
    )


def embedding_spec(folder: Path, config: ServerConfig) -> EmbeddingEngineSpec:
    """What the engine process is told."""
    engine, embedding = config.engine, config.embedding
    return EmbeddingEngineSpec(
        bundle=folder,
        device=engine.device,
        num_threads=num_threads(engine.threads),
        max_model_len=engine.max_model_len,
        log_level=config.server.log_level,
        window_s=embedding.batch_window_s,
        max_batch=embedding.max_batch_texts,
        max_length_difference=embedding.max_length_difference,
        max_batch_tokens=embedding.max_batch_tokens,
    )
