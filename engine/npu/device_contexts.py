"""Which contexts a bundle needs for a device, as installed here: the store to look them up in."""

from __future__ import annotations

from engine.bundle import Bundle
from engine.npu.context_store import ContextStore, bundle_digest
from engine.npu.device_config import DeviceConfig
from engine.npu.fused_graphs import fused_groups
from engine.npu.graphs import HEAD, part_names
from engine.npu.qnn_session import backend_library
from engine.npu.recipe import ContextRecipe, compile_options, plan_groups
from engine.npu.versions import provider_version, qairt_build, qairt_version


def context_store(bundle: Bundle, device: DeviceConfig, fused: bool = False) -> ContextStore:
    """`fused`: the form with the attention inside, too.

    Raises DeviceUnavailable without a provider, BundleError for an embedding model."""
    recipe = ContextRecipe(
        soc_model=device.soc_model,
        provider=provider_version(),
        qairt=qairt_version(qairt_build(backend_library())),
        bundle=bundle_digest(bundle),
        options=compile_options(device.provider_options),
        shared=not device.is_emulated,
    )
    num_layers = bundle.config.num_layers
    groups = plan_groups(part_names(num_layers), device.token_buckets, HEAD, device.head_buckets)
    extra = fused_groups(num_layers, device.fused) if fused else ()
    return ContextStore(bundle, recipe, (*groups, *extra))
