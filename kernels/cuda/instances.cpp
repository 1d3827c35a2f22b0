// The table of instances, made of instances.def, and the choice of one.
#include <algorithm>

#include "params.h"
#include "sm90/tiles.cuh"

namespace sdpa_cuda {
namespace {

const Instance kInstances[] = {
#define INSTANCE(name, element, D, Dv, mask, consumers, speed) \
  {Element::element,                                           \
   D,                                                          \
   Dv,                                                         \
   MaskKind::mask,                                             \
   kWarpgroupRows * consumers,                                 \
   tile_of<D, Dv, MaskKind::mask, consumers>().BLOCK_N,        \
   speed,                                                      \
   &launch_##name},
#include "instances.def"
#undef INSTANCE
};

const BackwardInstance kBackwardInstances[] = {
#define INSTANCE(name, element, D, Dv, mask) \
  {Element::element, D, Dv, MaskKind::mask, backward_tile_of<D, MaskKind::mask>().BLOCK_M, &launch_##name},
#include "backward_instances.def"
#undef INSTANCE
};

// An estimate in rows of queries: waves of work tiles, times a tile's rows, over the instance's speed. A last wave that
// is not full counts as a whole one. Where rows further down see more keys, a work tile takes half of the longest one's
// time in the mean, and on the diagonal half of a block of keys more; those that end last are short. So waves count
// there in fractions.
float time_of(const Instance& it, const FlashParams& p) {
  const int blocks = blocks_of(p, it.BLOCK_M), tiles = blocks * p.B * p.H;
  const float mean = 0.5f + 0.5f / blocks + 0.5f * it.BLOCK_N / std::max(1, p.N);
  const float waves =
      grows(it.mask, p) ? std::max(1.f, mean * tiles / p.sm_count) : (tiles + p.sm_count - 1) / p.sm_count;
  return waves * it.BLOCK_M / it.speed;
}

}  // namespace

const Instance* find_instance(Element element, MaskKind mask, const FlashParams& p) {
  const Instance* found = nullptr;
  for (const Instance& it : kInstances) {
    if (it.element != element || it.mask != mask || p.D > it.D || p.Dv > it.Dv) continue;
    const int more = found ? it.D + it.Dv - (found->D + found->Dv) : -1;
    if (more < 0 || (more == 0 && time_of(it, p) < time_of(*found, p))) found = &it;
  }
  return found;
}

const BackwardInstance* find_backward_instance(Element element, MaskKind mask, const FlashParams& p) {
  const BackwardInstance* found = nullptr;
  for (const BackwardInstance& it : kBackwardInstances) {
    if (it.element != element || it.mask != mask || p.D > it.D || p.Dv > it.Dv) continue;
    if (!found || it.D + it.Dv < found->D + found->Dv) found = &it;
  }
  return found;
}

}  // namespace sdpa_cuda
