#include "gemm/fill.h"

#include <algorithm>

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

// Reads a row and transforms it by `change`, except for the rotation of outputs, which needs all rows.
void read_row(const Part& part, const Change& change, int i, int columns, float* out) {
  widen_row(part.source, part.row(i), columns, out);
  if (change.gains) {
    for (int c = 0; c < columns; ++c) out[c] *= change.gains[c];
  }
  if (change.columns) change.columns->apply(out, out);
}

void pack(Matrix& matrix, const Part& part, int i, const float* values) {
  matrix.set_row(place_row(part.place, part.first, i), Source::kFloat32, reinterpret_cast<const uint8_t*>(values));
}

void fill_turned_outputs(Member& member, Matrix& matrix, const Part& part, const Change& change, const Rows& by_column) {
  const int columns = matrix.columns;
  const Rows own(1, columns);
  member.for_each(part.count, [&](int i) {
    read_row(part, change, i, columns, own[0]);
    for (int c = 0; c < columns; ++c) by_column[c][i] = own[0][c];
  });
  member.for_each(columns, [&](int c) { change.outputs->apply(by_column[c], by_column[c]); });
  member.for_each(part.count, [&](int i) {
    for (int c = 0; c < columns; ++c) own[0][c] = by_column[c][i];
    pack(matrix, part, i, own[0]);
  });
}

}  // namespace

void fill(Team& team, Matrix& matrix, const Part& part, const Change& change) {
  const Rows by_column(change.outputs ? matrix.columns : 0, part.count);
  team.start([&](Member& member) {
    if (change.outputs) {
      fill_turned_outputs(member, matrix, part, change, by_column);
    } else if (change.is_none()) {
      member.for_each(part.count, [&](int i) {
        matrix.set_row(place_row(part.place, part.first, i), part.source, part.row(i));
      });
    } else {
      const Rows own(1, matrix.columns);
      member.for_each(part.count, [&](int i) {
        read_row(part, change, i, matrix.columns, own[0]);
        pack(matrix, part, i, own[0]);
      });
    }
  });
  team.join();
}

}  // namespace penstock
