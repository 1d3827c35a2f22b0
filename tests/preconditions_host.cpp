// Calls a primitive of the CPU's portable instruction set, by the first argument with a precondition that does not
// hold. test_cpu_preconditions.py builds it with the asserts of kernels/cpu.
#include <cstdio>
#include <map>
#include <string>

#include "primitives.h"

using namespace sdpa_cpu;

namespace {

constexpr int64_t kLd = 16, kRows = 4;
alignas(64) float a[64 * kLd], b[64 * kLd], c[64 * kLd], row_max[kRows], row_sum[kRows * kMaxLanes], alpha[kRows];

const Primitives<float>& table() { return *kScalar.f32; }
Source source(int64_t row_stride, int64_t column_stride) { return {b, Dtype::kFloat32, row_stride, column_stride}; }

void accumulate(int64_t width, int64_t row_stride, int64_t depth_stride, int64_t column_stride) {
  table().accumulate(kRows, width, 3, a, row_stride, depth_stride, source(kLd, column_stride), c, kLd, nullptr);
}
void softmax(int64_t columns, int64_t ld) { table().softmax_step(kRows, columns, c, ld, row_max, row_sum, alpha); }

const std::map<std::string, void (*)()> kCases = {
    {"all hold",
     [] {
       table().pack_left(source(kLd, 1), kRows, 5, a, kLd);
       table().pack_columns(source(kLd, 1), 7, 5, c, kLd);
       table().scores(kRows, 7, 5, a, kLd, b, kLd, 1.0f, c, kLd);
       table().scores_direct(kRows, 7, 5, a, kLd, source(kLd, 1), 1.0f, c, kLd);
       softmax(7, kLd);
       accumulate(8, kLd, 1, 1);
       accumulate(8, 1, kLd, 1);
       table().store_rows(c, kLd, nullptr, kRows, 5, b, Dtype::kFloat32, kLd);
     }},
    {"a width of whole vectors", [] { accumulate(7, kLd, 1, 1); }},
    {"values with column stride 1", [] { accumulate(8, kLd, 1, 2); }},
    {"one stride of the left operand is 1", [] { accumulate(8, kLd, 2, 1); }},
    {"columns of a softmax", [] { softmax(0, kLd); }},
    {"columns within the leading dimension", [] { softmax(kLd + 1, kLd); }},
    {"a leading dimension of whole vectors", [] { softmax(5, 7); }},
    {"packed rows within the leading dimension", [] { table().pack_columns(source(kLd, 1), kLd + 1, 5, c, kLd); }},
    {"loaded columns within the leading dimension", [] { table().pack_left(source(2 * kLd, 1), 2, kLd + 1, a, kLd); }},
    {"keys with column stride 1", [] { table().scores_direct(kRows, 7, 5, a, kLd, source(kLd, 2), 1.0f, c, kLd); }},
    {"rows of a product", [] { table().scores(0, 7, 5, a, kLd, b, kLd, 1.0f, c, kLd); }},
    {"a cap that is not 0", [] { table().softcap(kRows, 7, c, nullptr, kLd, 0.0f); }},
};

}  // namespace

int main(int count, char** arguments) {
  if (count == 1)
    for (const auto& [name, call] : kCases) printf("%s\n", name.c_str());
  else
    kCases.at(arguments[1])();
}
