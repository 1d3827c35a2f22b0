// When products of pairs, or quads, may stand in for plain ones.
#pragma once

#include <initializer_list>

#include "params.h"

namespace sdpa_cpu {

// A product of pairs takes a hidden key along with its neighbour, so that 0 * NaN would reach the result: where a
// structured mask hides keys, the tensors must be finite.
template <typename T>
bool pairs_are_exact(const AttentionParams& params, const Primitives<T>& prim,
                     std::initializer_list<const View*> tensors);

}  // namespace sdpa_cpu
