"""The Python interface of the compiled kernels: a model to fill with weights, and the steps that it runs."""

from __future__ import annotations

import ctypes as c
import weakref
from collections.abc import Sequence
from enum import IntEnum
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.cpu.structs import (
    ExchangeState,
    Format,
    KernelError,
    LowRankPart,
    LowRankRows,
    NativeLayer,
    NativePlan,
    NativeShapes,
    NativeSpec,
    RowLayout,
    Run,
    Source,
    check_sizes,
    low_rank_table,
)


class Slot(IntEnum):
    """The matrices of a model; EMBEDDING, HEAD and TOKEN_INPUTS belong to no layer. GATES has only adapters."""

    QKV = 0
    OUT = 1
    MLP_IN = 2
    MLP_OUT = 3
    TOKEN_GATE = 4
    TOKEN_OUT = 5
    MIXER_OUT = 6
    EXPERT_IN = 7
    EXPERT_OUT = 8
    GATES = 9
    EMBEDDING = 10
    HEAD = 11
    TOKEN_INPUTS = 12


class Vector(IntEnum):
    """The float32 vectors and tables of a model."""

    ATTENTION_NORM = 0
    MLP_NORM = 1
    FINAL_NORM = 2
    ATTENTION_NORM_BIAS = 3
    MLP_NORM_BIAS = 4
    FINAL_NORM_BIAS = 5
    Q_NORM = 6
    K_NORM = 7
    SINKS = 31
    HEAD_GATES = 37
    COS = 8
    SIN = 9
    POSITION_BIASES = 10
    FINAL_GAINS = 11
    ATTENTION_OUTPUT_NORM = 12
    MLP_OUTPUT_NORM = 13
    ROUTER = 14
    ROUTER_BIAS = 30
    CONVOLUTION = 15
    CONVOLUTION_BIAS = 16
    GATES = 17
    DECAY_RATES = 18
    DECAY_BIASES = 19
    VALUE_NORM = 20
    CHOICE_BIAS = 21
    SHARED_GATE = 22
    SKIPS = 23
    OUTPUT_SCALE = 24
    TOKEN_NORM = 25
    TOKEN_INPUT_NORM = 26
    POSITION_EMBEDDINGS = 27
    TYPE_EMBEDDINGS = 28
    EMBEDDING_NORM = 29
    EMBEDDING_NORM_BIAS = 32
    ATTENTION_SUM_NORM = 33
    ATTENTION_SUM_NORM_BIAS = 34
    MLP_SUM_NORM = 35
    MLP_SUM_NORM_BIAS = 36
    EXPERT_NORM = 38
    EXPERT_OUTPUT_NORM = 39
    DENSE_OUTPUT_NORM = 40
    ROUTER_NORM = 41
    EXPERT_FACTORS = 42
    QUERY_FACTORS = 43


class Activation(IntEnum):
    """The activation function of the MLP."""

    SILU = 0
    GELU = 1
    GELU_TANH = 2
    RELU2 = 3


class Ending(IntEnum):
    """How a step ended; the ranks of a group agree on it."""

    DONE = 0
    NO_MEMORY = 1
    ABORTED = 2


def addresses(*arrays: NDArray[Any] | None) -> list[int | None]:
    """Return where the arrays begin; None for an array that is None."""
    return [None if array is None else array.__array_interface__["data"][0] for array in arrays]


_NO_MEMORY = b"std::bad_alloc"


class NativeModel:
    """A decoder or an encoder in native memory with threads of its own. Not safe for use by several threads at once."""

    def __init__(self, library: Path, shapes: NativeShapes, num_threads: int, cores: Sequence[int] = ()) -> None:
        """Create the model. `cores`, one per thread, pins its threads; the first core is for the thread that waits."""
        self._library = open_library(library)
        self._kept: dict[tuple[Slot, int], NDArray[np.uint8]] = {}
        self._rows: dict[tuple[Slot, int], list[NDArray[Any]]] = {}
        """The rows of matrices that are packed on reading, and their orders."""
        self._handle = c.c_void_p()
        pinned_cores = (c.c_int32 * len(cores))(*cores) if cores else None
        sizes, handle = (c.byref(shapes.spec), shapes.layers), c.byref(self._handle)
        self._check(self._library.penstock_model_new(*sizes, num_threads, pinned_cores, handle))
        self._free = weakref.finalize(self, self._library.penstock_model_free, self._handle)

    def set_nodes(self, nodes: Sequence[int]) -> None:
        """Set the NUMA node of each thread's core, before the first step. With one node, nothing changes.

        Threads then take the work of their own node first, and items of a panel or a KV head stay on a node.
        """
        self._library.penstock_nodes_set(self._handle, (c.c_int32 * len(nodes))(*nodes))

    def close(self) -> None:
        """End the threads and free all memory, as garbage collection does. The model cannot be used afterwards."""
        self._free()

    def allocate(self, slot: Slot, layer: int, runs: Sequence[Run], columns: int) -> None:
        """Create a matrix of zeros. Every run but the last has a multiple of 32 rows."""
        self._create(slot, layer, runs, columns, None)
        self._kept.pop((slot, layer), None)

    def use(self, slot: Slot, layer: int, runs: Sequence[Run], columns: int, packed: NDArray[np.uint8]) -> None:
        """Use a packed matrix in place. `packed`: bytes that `NativeModel.packed` once returned, 64-byte aligned.

        They may also be others, if `fill` then writes all rows, and the padding of the last panel is zeros.
        """
        self._create(slot, layer, runs, columns, packed.ctypes.data)
        self._kept[slot, layer] = packed

    def pack_on_read(self, slot: Slot, layer: int, runs: Sequence[Run], columns: int) -> None:
        """Create a matrix that has no bytes of its own. `fill` then names its rows, and each step packs them anew.

        The rows must be stored in formats that the runs keep to the bit. The outputs are those of the packed matrix.
        """
        self._check(self._library.penstock_matrix_on_read(self._handle, layer, slot, *_c_runs(runs), columns))
        self._kept.pop((slot, layer), None)
        self._rows[slot, layer] = []

    def _create(self, slot: Slot, layer: int, runs: Sequence[Run], columns: int, address: int | None) -> None:
        call = self._library.penstock_matrix_new
        self._check(call(self._handle, layer, slot, *_c_runs(runs), columns, address))
        self._rows.pop((slot, layer), None)

    def packed(self, slot: Slot, layer: int) -> NDArray[np.uint8]:
        """Return the bytes of a matrix, panel by panel. The array is valid only as long as the matrix exists."""
        address, count = self._bytes(slot, layer)
        return np.ctypeslib.as_array(c.cast(address, c.POINTER(c.c_uint8)), (count,))

    def num_bytes(self, slot: Slot, layer: int) -> int:
        """Return the size of a matrix when it is packed."""
        return self._bytes(slot, layer)[1]

    def _bytes(self, slot: Slot, layer: int) -> tuple[int, int]:
        """Return the address and the size of a matrix. The address is 0 if it is packed on reading."""
        count = c.c_size_t()
        address = self._library.penstock_matrix_bytes(self._handle, layer, slot, c.byref(count))
        return address or 0, count.value

    def release(self, slot: Slot, layer: int) -> None:
        """Free a matrix. Another one must replace it before the next step."""
        self.allocate(slot, layer, [(Format.BF16, 0)], 0)

    def fill(
        self,
        slot: Slot,
        layer: int,
        source: Source,
        data: NDArray[np.uint8],
        *,
        first: int = 0,
        layout: RowLayout = RowLayout.PLAIN,
        row_order: NDArray[np.int32] | None = None,
        gains: NDArray[np.float32] | None = None,
    ) -> None:
        """Pack rows into a matrix. data: [rows, bytes of a row]; with `row_order`, row i is data[row_order[i]].

        gains: [columns], the weights of the norm before the matrix, if the model is Hadamard-rotated.
        """
        data = np.ascontiguousarray(data)
        if (slot, layer) in self._rows:
            self._rows[slot, layer] += [data] if row_order is None else [data, row_order]
        order, factors = (None if array is None else array.ctypes.data for array in (row_order, gains))
        row_bytes = data.shape[1]
        rows = len(data if row_order is None else row_order)
        call = self._library.penstock_matrix_fill
        address = data.ctypes.data
        self._check(call(self._handle, layer, slot, source, layout, first, rows, address, row_bytes, order, factors))

    def set_bias(
        self,
        slot: Slot,
        layer: int,
        values: NDArray[np.float32],
        *,
        first: int = 0,
        layout: RowLayout = RowLayout.PLAIN,
    ) -> None:
        """Set the biases of a matrix for the rows of one part. values: [rows]."""
        values = np.ascontiguousarray(values, dtype=np.float32)
        call = self._library.penstock_bias_fill
        self._check(call(self._handle, layer, slot, layout, first, values.ctypes.data, len(values)))

    def set_vector(self, vector: Vector, layer: int, values: NDArray[np.float32]) -> None:
        """Set the weights or biases of a norm, or a table. For COS and SIN, `layer` is the index of the RoPE table."""
        values = np.ascontiguousarray(values, dtype=np.float32)
        call = self._library.penstock_vector_fill
        self._check(call(self._handle, layer, vector, values.ctypes.data, values.size))

    def vector(self, vector: Vector, layer: int, *shape: int) -> NDArray[np.float32]:
        """Return the memory of a vector or table, to be written. It is valid until the vector is set again.

        Otherwise as `set_vector`, but large tables need no copy.
        """
        address = c.POINTER(c.c_float)()
        call = self._library.penstock_vector_at
        self._check(call(self._handle, layer, vector, prod(shape), c.byref(address)))
        return np.ctypeslib.as_array(address, shape)

    def set_adapter(
        self, adapter_slot: int, slot: Slot, layer: int, parts: Sequence[LowRankRows], gains: NDArray[np.float32] | None
    ) -> None:
        """Set what the adapter in `adapter_slot` adds to a packed matrix. No step may be running. gains: see `fill`."""
        factors, call = None if gains is None else gains.ctypes.data, self._library.penstock_adapter_set
        self._check(call(self._handle, adapter_slot, layer, slot, low_rank_table(parts), len(parts), factors))

    def start(self, plan: NativePlan) -> None:
        """Start a step on the model's threads. The arrays of the plan must stay alive until `wait` returns.

        Raises MemoryError if there is not enough memory for the buffers of the step; no step has started then.

        While a step runs, each thread also allocates scratch memory for one row, and keeps it. That is some kilobytes,
        and for log-probabilities 4 bytes for each token of the vocabulary. If the system refuses it, the process ends.
        """
        self._check(self._library.penstock_step_start(self._handle, c.byref(plan)))

    def wait(self) -> int:
        """Wait for the step. Return the number of threads that computed it, or 0 once the model is closed.

        The number is below the model's thread count while other processes take cores.
        """
        return int(self._library.penstock_step_wait(self._handle)) if self._free.alive else 0

    @property
    def ending(self) -> Ending:
        """How the last step ended. NO_MEMORY: another rank of the group has no memory for it."""
        return Ending(self._library.penstock_step_ending(self._handle)) if self._free.alive else Ending.ABORTED

    def shared_bytes(self, plan: NativePlan) -> int:
        """Return how many bytes the ranks of a group must share for a step. No step may be running."""
        count = c.c_size_t()
        self._check(self._library.penstock_step_shared_bytes(self._handle, c.byref(plan), c.byref(count)))
        return count.value

    def use_shared(self, state: int, memory: int, num_bytes: int) -> None:
        """Set the addresses of the group's `ExchangeState` and of its memory for steps. No step may be running."""
        self._library.penstock_group_use(self._handle, state, memory, num_bytes)

    def rank_panels(self, slot: Slot, layer: int) -> list[int]:
        """Return the panels of a layer's matrix that this rank multiplies with, in the order of its threads' loop."""
        call = self._library.penstock_rank_panels
        panels = (c.c_int32 * int(call(self._handle, layer, slot, None)))()
        call(self._handle, layer, slot, panels)
        return list(panels)

    def bind_thread(self) -> None:
        """Declare that the calling thread does nothing but start steps and wait for them.

        It is then scheduled like the model's own threads. If these are pinned, it is pinned to the first core.
        """
        self._library.penstock_bind_thread(self._handle)

    @staticmethod
    def _check(error: bytes) -> None:
        if error == _NO_MEMORY:
            raise MemoryError("the native kernels ran out of memory")
        if error:
            raise KernelError(error.decode(errors="replace"))


def _c_runs(runs: Sequence[Run]) -> tuple[c.Array[c.c_int32], c.Array[c.c_int32], int]:
    """Return the formats of runs, their numbers of rows, and the number of runs."""
    formats, rows = ((c.c_int32 * len(runs))(*numbers) for numbers in zip(*runs, strict=True))
    return formats, rows, len(runs)


def open_library(path: Path) -> Any:
    """Load the compiled kernels, with the types of their functions. Raises AbiError."""
    library = c.CDLL(str(path))
    pointer, number = c.c_void_p, c.c_int
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "penstock_isa": (c.c_char_p, []),
        "penstock_model_new": (c.c_char_p, [pointer, pointer, number, pointer, pointer]),
        "penstock_bind_thread": (None, [pointer]),
        "penstock_nodes_set": (None, [pointer, pointer]),
        "penstock_model_free": (None, [pointer]),
        "penstock_matrix_new": (c.c_char_p, [pointer, number, number, pointer, pointer, number, number, pointer]),
        "penstock_matrix_on_read": (c.c_char_p, [pointer, number, number, pointer, pointer, number, number]),
        "penstock_matrix_bytes": (pointer, [pointer, number, number, pointer]),
        "penstock_matrix_fill": (c.c_char_p, [pointer, *[number] * 6, pointer, c.c_size_t, pointer, pointer]),
        "penstock_vector_fill": (c.c_char_p, [pointer, number, number, pointer, c.c_size_t]),
        "penstock_vector_at": (c.c_char_p, [pointer, number, number, c.c_size_t, pointer]),
        "penstock_bias_fill": (c.c_char_p, [pointer, *[number] * 4, pointer, number]),
        "penstock_adapter_set": (c.c_char_p, [pointer, *[number] * 3, pointer, number, pointer]),
        "penstock_step_start": (c.c_char_p, [pointer, pointer]),
        "penstock_step_wait": (number, [pointer]),
        "penstock_step_ending": (number, [pointer]),
        "penstock_step_shared_bytes": (c.c_char_p, [pointer, pointer, pointer]),
        "penstock_rank_panels": (number, [pointer, number, number, pointer]),
        "penstock_group_use": (None, [pointer, pointer, pointer, c.c_size_t]),
        "penstock_exchange_hand_out": (None, [pointer, c.c_uint32]),
        "penstock_exchange_await": (c.c_uint32, [pointer, c.c_uint32, c.c_int64]),
        "penstock_exchange_vote": (number, [pointer, number, number, number]),
        "penstock_exchange_abort": (None, [pointer]),
        "penstock_exchange_repeat": (number, [pointer, number, number, number, pointer, number]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    structs: dict[str, type[c.Structure]] = {"spec": NativeSpec, "layer_spec": NativeLayer, "plan": NativePlan}
    check_sizes(library, structs | {"low_rank_part": LowRankPart, "exchange_state": ExchangeState})
    return library
