// When products of bfloat16, in pairs or quads, or of parts of float16, may replace products in float32.
#pragma once

#include <initializer_list>

#include "params.h"

namespace sdpa_cpu {

// Whether all of `values` [rows, width] is finite. Their type has 16 bits.
bool finite_halves(const Source& values, int64_t rows, int64_t width);

// Whether all of these tensors of a call are finite. Their type has 16 bits.
bool all_finite(const AttentionParams& params, std::initializer_list<const View*> tensors);

// Whether products in pairs give the same result. A pair multiplies a masked key along with its visible neighbour, so
// that 0 * NaN would reach the result. So the bfloat16 tensors must be finite where a structured mask hides keys.
bool pairs_are_exact(const AttentionParams& params, std::initializer_list<const View*> tensors);

}  // namespace sdpa_cpu
