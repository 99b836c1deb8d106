"""Name → model, for models of both kinds, with the errors for names that do not fit.

Knows nothing of engines, loading or HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence

from server.errors import UnknownModel, WrongModelKind
from server.served_embedder import ServedEmbedder
from server.served_model import ModelRegistry, ServedModel

Served = ServedModel | ServedEmbedder


class ServedModels:
    """What is served now, in the order of loading. Implements `ModelRegistry`."""

    def __init__(self, *models: Served) -> None:
        self._by_name = {model.name: model for model in models}

    def add(self, model: Served) -> None:
        self._by_name[model.name] = model

    def remove(self, name: str) -> Served:
        """By name or alias. Raises UnknownModel."""
        return self._by_name.pop(self.find(name).name)

    def find(self, name: str) -> Served:
        """By name or alias, of any kind. Raises UnknownModel."""
        for model in self._by_name.values():
            if name == model.name or name in model.aliases:
                return model
        raise UnknownModel(name, tuple(self._by_name))

    def everything(self) -> tuple[Served, ...]:
        return tuple(self._by_name.values())

    def get(self, name: str | None) -> ServedModel:
        """A model that writes text; None is the first one. Raises UnknownModel, WrongModelKind."""
        models = self.list()
        if name is None and models:
            return models[0]
        model = self._find_or_default(name)
        if isinstance(model, ServedModel):
            return model
        raise WrongModelKind(
            f"The model '{model.name}' is {_kind_of(model)} and cannot write text. "
            f"Models that can: {_listed(models)}."
        )

    def get_embedder(self, name: str | None) -> ServedEmbedder:
        """An embedding model; None is the first one. Raises UnknownModel, WrongModelKind."""
        embedders = [model for model in self.embedders() if not model.is_cross_encoder]
        if name is None and embedders:
            return embedders[0]
        model = self._find_or_default(name)
        if isinstance(model, ServedEmbedder) and not model.is_cross_encoder:
            return model
        what = "writes text" if isinstance(model, ServedModel) else "scores documents for a query"
        raise WrongModelKind(
            f"The model '{model.name}' {what} and gives no embeddings. "
            f"Embedding models served here: {_listed(embedders)}."
        )

    def get_reranker(self, name: str | None) -> ServedEmbedder:
        """A cross-encoder or an embedding model; None is the first cross-encoder or, without one,
        the first embedding model. Raises UnknownModel, WrongModelKind."""
        rerankers = sorted(self.embedders(), key=lambda model: not model.is_cross_encoder)
        if name is None and rerankers:
            return rerankers[0]
        model = self._find_or_default(name)
        if isinstance(model, ServedEmbedder):
            return model
        raise WrongModelKind(
            f"The model '{model.name}' writes text and cannot rank documents. "
            f"Models that can: {_listed(rerankers)}."
        )

    def list(self) -> Sequence[ServedModel]:
        """The models that write text, the default one first."""
        return [model for model in self.everything() if isinstance(model, ServedModel)]

    def embedders(self) -> Sequence[ServedEmbedder]:
        """The embedding models and cross-encoders, in the order of loading."""
        return [model for model in self.everything() if isinstance(model, ServedEmbedder)]

    def _find_or_default(self, name: str | None) -> Served:
        if name is None and self._by_name:
            return next(iter(self._by_name.values()))
        return self.find(name or "(default)")


def model_of_any_kind(models: ModelRegistry, name: str | None) -> Served:
    """None is the first model that writes text, or one that does not if there is none.

    Raises UnknownModel.
    """
    try:
        return models.get(name)
    except WrongModelKind:
        return models.get_reranker(name)


def _kind_of(model: Served) -> str:
    if isinstance(model, ServedEmbedder) and model.is_cross_encoder:
        return "a cross-encoder: it serves /v1/rerank"
    return "an embedding model: it serves /v1/embeddings and /v1/rerank"


def _listed(models: Sequence[Served]) -> str:
    return ", ".join(model.name for model in models) or "none"
