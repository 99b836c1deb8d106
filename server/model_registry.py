"""Name → model, for models of both kinds, with the errors for names that do not fit.

Knows nothing of engines, loading or HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence

from server.errors import UnknownModel, WrongModelKind
from server.served_embedder import ServedEmbedder
from server.served_model import ServedModel

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
            f"The model '{model.name}' is an embedding model: it serves /v1/embeddings and "
            f"/v1/rerank and cannot write text. Models that can: {_listed(models)}."
        )

    def get_embedder(self, name: str | None) -> ServedEmbedder:
        """An embedding model; None is the first one. Raises UnknownModel, WrongModelKind."""
        embedders = self.embedders()
        if name is None and embedders:
            return embedders[0]
        model = self._find_or_default(name)
        if isinstance(model, ServedEmbedder):
            return model
        raise WrongModelKind(
            f"The model '{model.name}' writes text and gives no embeddings. "
            f"Embedding models served here: {_listed(embedders)}."
        )

    def list(self) -> Sequence[ServedModel]:
        """The models that write text, the default one first."""
        return [model for model in self.everything() if isinstance(model, ServedModel)]

    def embedders(self) -> Sequence[ServedEmbedder]:
        """The embedding models, the default one first."""
        return [model for model in self.everything() if isinstance(model, ServedEmbedder)]

    def _find_or_default(self, name: str | None) -> Served:
        if name is None and self._by_name:
            return next(iter(self._by_name.values()))
        return self.find(name or "(default)")


def _listed(models: Sequence[Served]) -> str:
    return ", ".join(model.name for model in models) or "none"
