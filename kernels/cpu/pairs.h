// When products of pairs, or quads, may stand in for plain ones.
#pragma once

#include <initializer_list>

#include "params.h"

namespace sdpa_cpu {

// Whether all of `values` [rows, width], of a type of 16 bits, is finite.
bool finite_halves(const Source& values, int64_t rows, int64_t width);

// A product of pairs takes a hidden key along with its neighbour, so that 0 * NaN would reach the result: where a
// structured mask hides keys, the tensors, of bfloat16, must be finite.
bool pairs_are_exact(const AttentionParams& params, std::initializer_list<const View*> tensors);

}  // namespace sdpa_cpu
