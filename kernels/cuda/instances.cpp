// The table of instances, out of instances.def, and the choice of one.
#include <algorithm>

#include "params.h"
#include "sm90/tiles.cuh"

namespace sdpa_cuda {
namespace {

const Instance kInstances[] = {
#define INSTANCE(name, element, D, Dv, mask, groups, speed)                                                            \
  {Element::element, D, Dv, MaskKind::mask, kGroupRows * groups, tile_of<D, Dv, MaskKind::mask, groups>().keys, speed, \
   &launch_##name},
#include "instances.def"
#undef INSTANCE
};

// Rounds of the multiprocessors, full or not, by what one takes. Where rows further down see more keys, blocks take
// half a round in the mean, and the last to end are short.
float time_of(const Instance& it, const FlashParams& p) {
  const int blocks = blocks_of(p, it.rows), all = blocks * p.B * p.H;
  const float mean = 0.5f + 0.5f / blocks;
  const float rounds = grows(it.mask, p) ? std::max(1.f, mean * all / p.cores) : (all + p.cores - 1) / p.cores;
  return rounds * it.rows / it.speed;
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

}  // namespace sdpa_cuda
