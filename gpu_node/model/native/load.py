"""Build the native runner for a described model, if this machine and the kernels support the model."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.architecture.spec import state_bytes
from penstock.gpu_node.model.checkpoint.description import Description
from penstock.gpu_node.model.checkpoint.source import Progress
from penstock.gpu_node.model.checkpoint.tensors import DecoderTensors
from penstock.gpu_node.model.lora.library import AdapterLibrary
from penstock.gpu_node.model.native.packed_file import PackedWeights
from penstock.gpu_node.model.native.packing import NativeAdapters
from penstock.gpu_node.model.native.placement import NumaPlacement
from penstock.gpu_node.model.native.ranks import (
    NativeRank,
    NativeRanks,
    RankPlace,
    RankStart,
    SharedWeights,
    check_size,
    facts_of,
)
from penstock.gpu_node.model.native.runner import NativeRunner, TokenRows
from penstock.gpu_node.model.native.shapes import (
    CHUNK_TOKENS,
    KV_FORMATS,
    PAGE_TOKENS,
    NativeUnavailableError,
    cache_sizes_of,
    check_sizes,
    shapes_of,
    token_bytes_of,
)
from penstock.gpu_node.model.native.weight_cache import WeightCache
from penstock.gpu_node.model.native.weight_loader import WeightLoader
from penstock.gpu_node.model.options import RunnerOptions
from penstock.gpu_node.model.protocol import RankBytes, StateSizes
from penstock.gpu_node.model.ranks.group import RankGroup
from penstock.gpu_node.model.torch_common.positions import alibi_biases, query_factors, write_rope_angles
from penstock.kernels.cpu.build import BUILD_REMEDY, BuildError, library_path, prebuilt_library
from penstock.kernels.cpu.library import NativeModel, Slot, Vector
from penstock.kernels.cpu.probe import (
    NO_ISA,
    NO_ISA_REMEDY,
    REQUIRED_FLAGS,
    Isa,
    best_isa,
    cores_to_stay_on,
    cpu_flags,
    cpu_vendor,
    usable_cores,
)
from penstock.kernels.cpu.structs import AbiError, Format, KernelError, KvFormat, NativeShapes
from penstock.runtime.cache_folders import cache_folder, private_folder, trusted_cache
from penstock.runtime.trusted_folders import check_file

log = logging.getLogger(__package__)


def load_native(described: Description, options: RunnerOptions, progress: Progress) -> tuple[NativeRunner, str]:
    """Return the runner and the name of its arithmetic.

    Raises NativeUnavailableError. Raises ConfigError for a checkpoint that is missing, truncated or inconsistent, and
    for threads that the system cannot start.
    """
    _check(described, options)
    check_isa(options)
    isa, library = kernels_for(options.cpu_isa, progress)
    spec, kv_format = described.spec, KV_FORMATS[options.kv_cache_dtype]
    sizes = cache_sizes_of(described, options)
    threads = options.num_threads or max(1, usable_cores() - options.reserved_cores)
    place = RankPlace(0, options.tensor_parallel_size)
    if place.size > 1:
        check_size(place.size, spec, threads)
    shapes = shapes_of(described, options, sizes.num_blocks, kv_format, place, sizes.windows)
    model, placement = new_model(library, shapes, place, threads)
    quantization, rotated = options.quantization, bool(shapes.spec.hadamard_rotation)
    if quantization == "int8" and not rotated:
        quantization = "int8_group"
    layout = f"{library.stem}-{quantization}{'-rotated' if rotated else ''}"
    # Random weights take seconds to make and gigabytes to keep.
    cache = WeightCache(described, layout) if options.weight_cache and not described.source.is_dummy else None
    weights = WeightLoader(described, library, shapes, quantization, placement)
    # The tables are computed outside the interpreter, while the weights are opened. The model keeps both apart.
    shared: SharedWeights | None = None
    packing, own_bytes = None, 0
    with ThreadPoolExecutor(1, "penstock-positions") as pool:
        positions = pool.submit(set_positions, model, described)
        if place.size > 1:
            formats, shared, own_bytes = weights.load_shared(model, cache, progress)
        else:
            formats, packing = weights.load(model, cache, progress)
        positions.result()
    arithmetic = arithmetic_of(isa, formats, kv_format, rotated=rotated)
    if options.kv_cache_dtype == "fp8":
        log.warning("the KV cache is int8: fp8 needs a GPU", extra={"arithmetic": arithmetic})
    facts = {"arithmetic": arithmetic, "num_threads": threads, "num_window_blocks": sizes.windows.num_blocks}
    facts |= {"num_kv_blocks": sizes.num_device_blocks, "num_swap_blocks": sizes.num_host_blocks}
    log.info("native runner", extra=facts)
    adapters = NativeAdapters(model, described, rotated=rotated)
    ranks = None
    if shared is not None:
        source = described.source.gguf or described.source.folder
        counts = {"num_blocks": sizes.num_blocks, "num_threads": threads}
        start = RankStart(source, options, shared, **counts)
        group = RankGroup(
            place.size, lambda memory: memory.exchange(library, *place), start, stall_s=options.rank_stall_s
        )
        held = _held_by(described, options, place, sizes.num_blocks, own_bytes)
        ranks = NativeRanks(model, group, shared, facts_of(library, shapes), held)
    runner = NativeRunner(
        model,
        adapters,
        sizes,
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        states=StateSizes(shapes.spec.num_state_slots, state_bytes(spec)),
        num_threads=len(place.threads_of(threads)),
        leaves_core_free=threads < usable_cores(),
        weight_bytes=weight_bytes_of(model, spec.num_layers, has_embedding=rotated or not spec.tied_head),
        packing=packing,
        ranks=ranks,
        token_rows=_token_rows(described),
    )
    return runner, arithmetic


def _token_rows(described: Description) -> TokenRows | None:
    """Return a function from token ids to the tokens' embeddings for each layer, read from the mapped file."""
    if described.spec.token_inputs is None:
        return None
    stored = DecoderTensors(described.open_checkpoint(), described.spec).token_inputs()
    if stored is None:
        return None
    table = stored.table

    def rows(ids: NDArray[np.int32]) -> NDArray[np.float32]:
        return table.take_rows(ids, len(ids), table.shape[1]).to_float32()

    return rows


def load_rank(
    described: Description,
    options: RunnerOptions,
    place: RankPlace,
    weights: SharedWeights,
    *,
    num_blocks: int,
    num_threads: int,
) -> tuple[NativeRank, dict[str, str], Path]:
    """Load a further rank of a model that rank 0 has loaded with these options. num_threads: of all ranks together.

    Return it with the facts that rank 0 compares, and the kernel library.
    """
    _, library = kernels_for(options.cpu_isa, lambda stage, fraction: None)
    kv_format = KV_FORMATS[options.kv_cache_dtype]
    shapes = shapes_of(described, options, num_blocks, kv_format, place)
    model, placement = new_model(library, shapes, place, num_threads)
    set_positions(model, described)
    packed = PackedWeights.of_descriptor(*weights)
    packed.read_ahead(model.rank_panels)
    packed.place(placement, model.rank_panels)
    packed.give_to(model)
    adapters = NativeAdapters(model, described, rotated=bool(shapes.spec.hadamard_rotation))
    named = AdapterLibrary(described.spec, options.lora, options.lora_dir, options.max_lora_rank)
    held = _held_by(described, options, place, num_blocks, packed.rank_bytes(model.rank_panels))
    return NativeRank(model, adapters, named, held), facts_of(library, shapes), library


_BF16_PRODUCTS: dict[Isa, str] = {"avx512": "avx512-", "avx512_vnni": "avx2-", "avx2": "avx2-"}
"""What names the order in which a set adds the products of bf16. All else has the same bits on all sets."""


def arithmetic_of(isa: Isa, formats: Iterable[Format], kv_format: KvFormat, *, rotated: bool) -> str:
    """Return the name of an arithmetic. Two nodes with the same name compute the same bits, whatever their CPUs."""
    formats = sorted(formats)
    products = _BF16_PRODUCTS[isa] if Format.BF16 in formats or kv_format is KvFormat.BF16 else ""
    weights = "+".join(one.name.lower() for one in formats)
    if rotated:
        weights += "-rotated"
    # Keys in int8 are always rotated.
    kv = "int8-rotated" if kv_format is KvFormat.INT8 else kv_format.name.lower()
    return f"native-{products}{weights}-kv-{kv}"


def _held_by(
    described: Description, options: RunnerOptions, place: RankPlace, num_blocks: int, weight_bytes: int
) -> RankBytes:
    token_bytes = token_bytes_of(described.spec, options.kv_cache_dtype, place)
    return RankBytes(weight_bytes, token_bytes * options.block_size * num_blocks)


def new_model(
    library: Path, shapes: NativeShapes, place: RankPlace, num_threads: int
) -> tuple[NativeModel, NumaPlacement]:
    """Create the model of a rank, and return it with its cores; num_threads: of all ranks. Raises ConfigError."""
    own = place.threads_of(num_threads)
    # In the order of their NUMA nodes, so that a rank lies on few of them.
    placement = NumaPlacement.of(cores_to_stay_on(num_threads)).part(own)
    try:
        model = NativeModel(library, shapes, len(own), placement.cores)
    except AbiError as error:
        raise ConfigError(f"the compiled kernels do not fit this code, build them again: {error}") from error
    except KernelError as error:
        raise ConfigError(f"num_threads {num_threads} cannot be started: {error}") from error
    if placement.is_spread:
        model.set_nodes(placement.nodes)
    if placement.copies:
        log.info("weights are placed by NUMA node", extra={"nodes": list(dict.fromkeys(placement.nodes))})
    return model, placement


def set_positions(model: NativeModel, described: Description) -> None:
    """Set the RoPE angles, the factors of queries and the ALiBi score biases by position."""
    biased = described.spec.biased_attention
    if biased is not None:
        num_positions = -(-described.max_model_len // CHUNK_TOKENS) * CHUNK_TOKENS
        model.set_vector(Vector.POSITION_BIASES, 0, alibi_biases(biased, num_positions))
    for i, growth in enumerate(described.spec.query_growths):
        model.set_vector(Vector.QUERY_FACTORS, i, query_factors(growth, described.max_model_len))
    for i, rope in enumerate(described.spec.ropes):
        shape = described.max_model_len, rope.dim // 2
        write_rope_angles(rope, model.vector(Vector.COS, i, *shape), model.vector(Vector.SIN, i, *shape))


def weight_bytes_of(model: NativeModel, num_layers: int, *, has_embedding: bool) -> int:
    """Return the size of all matrices. A tied embedding has no matrix of its own."""
    of_model = Slot.EMBEDDING, Slot.HEAD, Slot.TOKEN_INPUTS
    matrices = [(slot, layer) for layer in range(num_layers) for slot in Slot if slot not in of_model]
    tables = [(Slot.HEAD, 0), (Slot.TOKEN_INPUTS, 0), *([(Slot.EMBEDDING, 0)] if has_embedding else [])]
    return sum(model.num_bytes(slot, layer) for slot, layer in matrices + tables)


def kernels_for(wanted: Isa | Literal["auto"], progress: Progress) -> tuple[Isa, Path]:
    """Return the instruction set and the path of its kernel library, which is compiled if necessary."""
    isa = best_isa(cpu_flags(), cpu_vendor()) if wanted == "auto" else wanted
    if isa is None:
        raise NativeUnavailableError(NO_ISA, NO_ISA_REMEDY)
    try:
        return isa, _library(isa, progress)
    except BuildError as error:
        raise NativeUnavailableError(str(error), BUILD_REMEDY) from error
    except OSError as error:
        raise NativeUnavailableError(str(error), "set PENSTOCK_CACHE to a folder that can be written") from error


def _library(isa: Isa, progress: Progress) -> Path:
    """Return the library of the package or in the cache, or one in a private folder if the cache is unusable."""
    if (prebuilt := prebuilt_library(isa)) is not None:
        return prebuilt
    try:
        folder = trusted_cache("native")
        library = library_path(isa, folder, lambda done: progress("compile", done))
        if library.parent == folder:
            check_file(library)
        return library
    except OSError as error:
        folder = private_folder(cache_folder() / "native", error)
        return library_path(isa, folder, lambda done: progress("compile", done))


def _check(described: Description, options: RunnerOptions) -> None:
    if options.dtype not in ("auto", "bfloat16"):
        raise NativeUnavailableError(f"the kernels compute in bfloat16, not {options.dtype}", "--dtype bfloat16")
    if options.dtype == "auto" and described.source.gguf is None and described.stored_dtype == "float32":
        reason = "the checkpoint is float32; dtype bfloat16 would round it"
        raise NativeUnavailableError(reason, "--dtype bfloat16 accepts that")
    if options.quantization == "fp8":
        reason = "quantization may be none, int8, int8_group and int4, not fp8, which needs a GPU"
        raise NativeUnavailableError(reason, "--quantization int8")
    if options.kv_cache_dtype not in KV_FORMATS:
        reason = f"the KV cache may be float16, bfloat16 or int8 (also for fp8), not {options.kv_cache_dtype}"
        raise NativeUnavailableError(reason, "--kv-cache-dtype int8")
    if options.block_size % PAGE_TOKENS:
        reason = f"block_size {options.block_size}: the native kernels need 16 or 32, because a page has {PAGE_TOKENS}"
        raise NativeUnavailableError(f"{reason} tokens", f"--block-size {PAGE_TOKENS}")
    check_sizes(described.spec)


def native_problem(described: Description, options: RunnerOptions) -> str | None:
    """Return why the native runner cannot compute a model on this machine; None if it can, once it is compiled."""
    try:
        _check(described, options)
    except NativeUnavailableError as error:
        return str(error)
    check_isa(options)
    return NO_ISA if best_isa(cpu_flags()) is None else None


def check_isa(options: RunnerOptions) -> None:
    """Raise ConfigError for an instruction set that was chosen and that this CPU lacks."""
    if options.cpu_isa != "auto" and (missing := REQUIRED_FLAGS[options.cpu_isa] - (flags := cpu_flags())):
        usable = [isa for isa, required in REQUIRED_FLAGS.items() if required <= flags]
        others = f"; it may be auto or {', '.join(usable)}" if usable else ""
        raise ConfigError(
            f"cpu_isa {options.cpu_isa}: this CPU has no {', '.join(sorted(missing))}{others}", param="cpu_isa"
        )
