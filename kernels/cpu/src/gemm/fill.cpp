#include "gemm/fill.h"

#include <algorithm>
#include <stdexcept>

namespace penstock {
namespace {

// Rows of numbers, padded as a Hadamard rotation needs.
class Rows {
 public:
  Rows(int count, int columns) : stride_(round_up(columns, kLanes)), values_((size_t)count * stride_) {}
  float* operator[](int i) const { return values_.data() + (size_t)i * stride_; }

 private:
  int stride_;
  Buffer<float> values_;
};

// Reads a row and transforms it by `transform`, except for the rotation of outputs, which needs all rows.
void read_row(const Part& part, const WeightTransform& transform, int i, int columns, float* out) {
  widen_row(part.source, part.row(i), columns, out);
  if (transform.gains) {
    for (int c = 0; c < columns; ++c) out[c] *= transform.gains[c];
  }
  if (transform.columns) transform.columns->apply(out, out);
}

void pack(Matrix& matrix, const Part& part, int i, const float* values) {
  matrix.set_row(packed_row(part.layout, part.first, i), Source::kFloat32, reinterpret_cast<const uint8_t*>(values));
}

void fill_rotated_outputs(Worker& worker, Matrix& matrix, const Part& part, const WeightTransform& transform,
                          const Rows& by_column) {
  const int columns = matrix.columns;
  const Rows own(1, columns);
  worker.for_each(part.count, [&](int i) {
    read_row(part, transform, i, columns, own[0]);
    for (int c = 0; c < columns; ++c) by_column[c][i] = own[0][c];
  });
  worker.for_each(columns, [&](int c) { transform.outputs->apply(by_column[c], by_column[c]); });
  worker.for_each(part.count, [&](int i) {
    for (int c = 0; c < columns; ++c) own[0][c] = by_column[c][i];
    pack(matrix, part, i, own[0]);
  });
}

}  // namespace

void fill(Team& team, Matrix& matrix, const Part& part, const WeightTransform& transform) {
  if (matrix.is_packed_on_read()) {
    if (!transform.is_none()) throw std::invalid_argument("rows that are packed on reading cannot be transformed");
    return matrix.add_part(part);
  }
  const Rows by_column(transform.outputs ? matrix.columns : 0, part.count);
  team.start([&](Worker& worker) {
    if (transform.outputs) {
      fill_rotated_outputs(worker, matrix, part, transform, by_column);
    } else if (transform.is_none()) {
      const PanelRange panels = panels_of(part);
      worker.for_each(panels.end - panels.begin, [&](int i) { matrix.set_rows(panels.begin + i, part); });
    } else {
      const Rows own(1, matrix.columns);
      worker.for_each(part.count, [&](int i) {
        read_row(part, transform, i, matrix.columns, own[0]);
        pack(matrix, part, i, own[0]);
      });
    }
  });
  team.join();
}

}  // namespace penstock
