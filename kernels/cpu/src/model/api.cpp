// The functions that Python calls through ctypes. They return an error as text, empty on success, and never throw.
#include <algorithm>
#include <cstring>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "gemm/gemm.h"
#include "model/model.h"

using namespace penstock;

namespace {

thread_local std::string last_error;

template <class Body>
const char* guarded(const Body& body) {
  last_error.clear();
  try {
    body();
  } catch (const std::exception& error) {
    last_error = error.what();
  }
  return last_error.c_str();
}

std::vector<Run> runs_of(const int32_t* formats, const int32_t* rows, int count) {
  std::vector<Run> runs;
  for (int i = 0; i < count; ++i) runs.push_back({(Format)formats[i], rows[i]});
  return runs;
}

enum Vector {
  kAttentionNorm = 0,
  kMlpNorm = 1,
  kFinalNorm = 2,
  kAttentionNormBias = 3,
  kMlpNormBias = 4,
  kFinalNormBias = 5,
  kQNorm = 6,
  kKNorm = 7,
  kSinks = 31,
  kCos = 8,
  kSin = 9,
  kPositionBiases = 10,
  kFinalGains = 11,
  kAttentionOutputNorm = 12,
  kMlpOutputNorm = 13,
  kRouter = 14,
  kRouterBias = 30,
  kConvolution = 15,
  kConvolutionBias = 16,
  kGates = 17,
  kDecayRates = 18,
  kDecayBiases = 19,
  kValueNorm = 20,
  kChoiceBias = 21,
  kSharedGate = 22,
  kSkips = 23,
  kOutputScale = 24,
  kTokenNorm = 25,
  kTokenInputNorm = 26,
  kPositionEmbeddings = 27,
  kTypeEmbeddings = 28,
  kEmbeddingNorm = 29,
  kEmbeddingNormBias = 32,
  kAttentionSumNorm = 33,
  kAttentionSumNormBias = 34,
  kMlpSumNorm = 35,
  kMlpSumNormBias = 36,
  kHeadGates = 37,
  kExpertNorm = 38,
  kExpertOutputNorm = 39,
  kDenseOutputNorm = 40,
  kRouterNorm = 41,
  kExpertFactors = 42,
  kQueryFactors = 43,
};

// `layer`: for kCos, kSin and kQueryFactors the index of the table.
Buffer<float>& vector_at(DecoderWeights& weights, int layer, int which) {
  switch (which) {
    case kAttentionNorm:
      return weights.layers[layer].attention_norm.weight;
    case kMlpNorm:
      return weights.layers[layer].mlp_norm.weight;
    case kFinalNorm:
      return weights.final_norm.weight;
    case kAttentionNormBias:
      return weights.layers[layer].attention_norm.bias;
    case kMlpNormBias:
      return weights.layers[layer].mlp_norm.bias;
    case kFinalNormBias:
      return weights.final_norm.bias;
    case kQNorm:
      return weights.layers[layer].q_norm;
    case kKNorm:
      return weights.layers[layer].k_norm;
    case kCos:
      return weights.positions.ropes[layer].cos;
    case kSin:
      return weights.positions.ropes[layer].sin;
    case kAttentionOutputNorm:
      return weights.layers[layer].attention_output_norm.weight;
    case kMlpOutputNorm:
      return weights.layers[layer].mlp_output_norm.weight;
    case kRouter:
      return weights.layers[layer].router;
    case kRouterBias:
      return weights.layers[layer].router_bias;
    case kHeadGates:
      return weights.layers[layer].head_gates;
    case kSinks:
      return weights.layers[layer].sinks;
    case kChoiceBias:
      return weights.layers[layer].choice_bias;
    case kSharedGate:
      return weights.layers[layer].shared_gate;
    case kConvolution:
      return weights.layers[layer].recurrent.convolution;
    case kConvolutionBias:
      return weights.layers[layer].recurrent.bias;
    case kGates:
      return weights.layers[layer].recurrent.gates;
    case kDecayRates:
      return weights.layers[layer].recurrent.decay_rates;
    case kDecayBiases:
      return weights.layers[layer].recurrent.decay_biases;
    case kSkips:
      return weights.layers[layer].recurrent.skips;
    case kValueNorm:
      return weights.layers[layer].recurrent.norm;
    case kOutputScale:
      return weights.layers[layer].output_scale;
    case kTokenNorm:
      return weights.layers[layer].token_norm.weight;
    case kTokenInputNorm:
      return weights.token_input_norm;
    case kPositionEmbeddings:
      return weights.positions.embeddings;
    case kTypeEmbeddings:
      return weights.type_embeddings;
    case kEmbeddingNorm:
      return weights.embedding_norm.weight;
    case kEmbeddingNormBias:
      return weights.embedding_norm.bias;
    case kAttentionSumNorm:
      return weights.layers[layer].attention_sum_norm.weight;
    case kAttentionSumNormBias:
      return weights.layers[layer].attention_sum_norm.bias;
    case kMlpSumNorm:
      return weights.layers[layer].mlp_sum_norm.weight;
    case kMlpSumNormBias:
      return weights.layers[layer].mlp_sum_norm.bias;
    case kExpertNorm:
      return weights.layers[layer].expert_norm.weight;
    case kExpertOutputNorm:
      return weights.layers[layer].expert_output_norm.weight;
    case kDenseOutputNorm:
      return weights.layers[layer].dense_output_norm.weight;
    case kRouterNorm:
      return weights.layers[layer].router_norm.weight;
    case kExpertFactors:
      return weights.layers[layer].expert_factors;
    case kQueryFactors:
      return weights.positions.query_factors[layer];
    case kFinalGains:
      return weights.final_gains;
    default:
      return weights.positions.biases;
  }
}

}  // namespace

#define PENSTOCK_API __attribute__((visibility("default")))

extern "C" {

PENSTOCK_API const char* penstock_isa() { return kIsa; }

PENSTOCK_API const char* penstock_model_new(const Spec* spec, const LayerSpec* layers, int num_threads,
                                            const int32_t* cores, Model** out) {
  return guarded([&] { *out = new Model(*spec, layers, num_threads, cores); });
}

// Declares that the calling thread does nothing but start steps and wait for them.
PENSTOCK_API void penstock_bind_thread(Model* model) { model->team().bind_leader(); }

// Sets the NUMA node of each thread's core, before the first step and before the KV cache is used.
PENSTOCK_API void penstock_nodes_set(Model* model, const int32_t* nodes) { model->set_nodes(nodes); }

PENSTOCK_API void penstock_model_free(Model* model) { delete model; }

// The matrix consists of `num_runs` runs of rows, each with a format. `packed`: null for a matrix of zeros to fill; else
// the bytes that penstock_matrix_bytes returned for such a matrix. They must outlive the model. A matrix that was packed
// on reading leaves its biases to the new one.
PENSTOCK_API const char* penstock_matrix_new(Model* model, int layer, int slot, const int32_t* formats,
                                             const int32_t* rows, int num_runs, int columns, uint8_t* packed) {
  return guarded([&] {
    Matrix& matrix = model->weights().matrix((Slot)slot, layer);
    Matrix created(runs_of(formats, rows, num_runs), columns, packed);
    if (matrix.is_packed_on_read()) created.bias = std::move(matrix.bias);
    matrix = std::move(created);
  });
}

// As penstock_matrix_new, for a matrix that is packed on reading. penstock_matrix_fill then only remembers rows, and the
// caller keeps them and their order until it replaces the matrix.
PENSTOCK_API const char* penstock_matrix_on_read(Model* model, int layer, int slot, const int32_t* formats,
                                                 const int32_t* rows, int num_runs, int columns) {
  return guarded([&] {
    model->weights().matrix((Slot)slot, layer) = Matrix::packed_on_read(runs_of(formats, rows, num_runs), columns);
  });
}

PENSTOCK_API const uint8_t* penstock_matrix_bytes(Model* model, int layer, int slot, size_t* count) {
  const Matrix& matrix = model->weights().matrix((Slot)slot, layer);
  *count = matrix.num_bytes();
  return matrix.bytes.data();
}

// Packs `count` rows of `row_bytes` each, on all threads. `row_order` and `gains` may be null.
PENSTOCK_API const char* penstock_matrix_fill(Model* model, int layer, int slot, int source, int layout, int first,
                                              int count, const uint8_t* data, size_t row_bytes,
                                              const int32_t* row_order, const float* gains) {
  return guarded([&] {
    const Part part{(Source)source, (RowLayout)layout, first, count, data, row_bytes, row_order};
    model->weights().fill(model->team(), (Slot)slot, layer, part, gains);
  });
}

PENSTOCK_API const char* penstock_vector_fill(Model* model, int layer, int which, const float* data, size_t count) {
  return guarded([&] {
    Buffer<float>& vector = vector_at(model->weights(), layer, which);
    vector.reserve(count);
    std::memcpy(vector.data(), data, count * sizeof(float));
  });
}

// Sets `address` to a vector with space for `count` numbers, for the caller to write. It is valid until the next call for
// that vector.
PENSTOCK_API const char* penstock_vector_at(Model* model, int layer, int which, size_t count, float** address) {
  return guarded([&] {
    Buffer<float>& vector = vector_at(model->weights(), layer, which);
    vector.reserve(count);
    *address = vector.data();
  });
}

PENSTOCK_API const char* penstock_bias_fill(Model* model, int layer, int slot, int layout, int first, const float* data,
                                            int count) {
  return guarded([&] { model->weights().set_bias((Slot)slot, layer, (RowLayout)layout, first, data, count); });
}

// No step may be running. `gains`: as for penstock_matrix_fill.
PENSTOCK_API const char* penstock_adapter_set(Model* model, int adapter_slot, int layer, int slot,
                                              const LowRankPart* parts, int num_parts, const float* gains) {
  return guarded([&] { model->set_adapter(adapter_slot, layer, (Slot)slot, parts, num_parts, gains); });
}

PENSTOCK_API const char* penstock_step_start(Model* model, const Plan* plan) {
  return guarded([&] { model->start(*plan); });
}

// Returns the bytes that the ranks of a group must share for a step. No step may be running.
PENSTOCK_API const char* penstock_step_shared_bytes(Model* model, const Plan* plan, size_t* count) {
  return guarded([&] { *count = model->shared_bytes(*plan); });
}

// Returns how the last step ended: see Ending.
PENSTOCK_API int penstock_step_ending(Model* model) { return (int)model->group().ending(); }

// Sets what the ranks of a group share: an ExchangeState, and memory for the steps. No step may be running.
PENSTOCK_API void penstock_group_use(Model* model, ExchangeState* state, uint8_t* memory, size_t size) {
  model->group().use(state, memory, size);
}

// Writes the panels of a layer's matrix that this rank multiplies with, in the order in which its threads share them.
// Returns their number. `panels` may be null.
PENSTOCK_API int penstock_rank_panels(Model* model, int layer, int slot, int32_t* panels) {
  const std::vector<int32_t> own = model->rank_panels(layer, (Slot)slot);
  if (panels) std::copy(own.begin(), own.end(), panels);
  return (int)own.size();
}

// Hands out message `number` to the other ranks.
PENSTOCK_API void penstock_exchange_hand_out(ExchangeState* state, uint32_t number) {
  state->refused.store(0, std::memory_order_relaxed);
  state->step.set(number);
}

// Waits for a message after `seen`, for the group's end, or for some time. Returns the number of the last message.
PENSTOCK_API uint32_t penstock_exchange_await(ExchangeState* state, uint32_t seen, int64_t patience_ns) {
  const auto is_aborted = [state] { return state->aborted.load(std::memory_order_acquire) != 0; };
  state->step.wait_while(seen, patience_ns, is_aborted);
  return state->step.value.load(std::memory_order_acquire);
}

// Meets the other ranks outside a step. Returns 1 if all of them could do the last message; 0 if one refused, or the
// group is aborted.
PENSTOCK_API int penstock_exchange_vote(ExchangeState* state, int rank, int size, int refuses) {
  Exchange exchange(rank, size);
  exchange.use(state);
  int64_t slept_ns = 0;
  return exchange.vote(refuses != 0, slept_ns) == Ending::kDone;
}

// Ends the group: all meetings, present and later ones, return at once.
PENSTOCK_API void penstock_exchange_abort(ExchangeState* state) {
  state->aborted.store(1, std::memory_order_seq_cst);
  state->step.wake();
  state->generation.wake();
}

// Runs `count` meetings of a rank, to measure them. Returns whether the group has not been aborted meanwhile.
PENSTOCK_API int penstock_exchange_repeat(ExchangeState* state, int rank, int size, int count, float* rows,
                                          int floats) {
  Exchange exchange(rank, size);
  exchange.use(state);
  const int begin = (int)((int64_t)floats * rank / size), end = (int)((int64_t)floats * (rank + 1) / size);
  float total = 0;
  int64_t slept_ns = 0;
  for (int i = 0; i < count; ++i) {
    for (int k = begin; k < end; ++k) rows[k] = (float)i + total;
    if (!exchange.meet(slept_ns)) return 0;
    float sum = 0;
    for (int k = 0; k < floats; ++k) sum += rows[k];
    total = sum > 0 ? 0 : 1;
    if (!exchange.meet(slept_ns)) return 0;
  }
  return 1;
}

// Returns the number of threads that computed the step. It is below the team's size while other processes take cores.
PENSTOCK_API int penstock_step_wait(Model* model) { return model->wait(); }

// The structs that Python fills in: loading compares their sizes with its own.
PENSTOCK_API size_t penstock_sizeof_spec() { return sizeof(Spec); }
PENSTOCK_API size_t penstock_sizeof_layer_spec() { return sizeof(LayerSpec); }
PENSTOCK_API size_t penstock_sizeof_plan() { return sizeof(Plan); }
PENSTOCK_API size_t penstock_sizeof_low_rank_part() { return sizeof(LowRankPart); }
PENSTOCK_API size_t penstock_sizeof_exchange_state() { return sizeof(ExchangeState); }

}  // extern "C"
