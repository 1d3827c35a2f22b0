// The tile instructions of AMX in plain C++: included before a source that uses the intrinsics, it takes their names.
#pragma once
#include <immintrin.h>
#include <stdint.h>

// As Intel's manual describes them for palette 1; what would fault ends the process with a message.
namespace tiles {

void load_configuration(const void* from);
void store_configuration(void* to);
void release();
void zero(int tile);
void load(int tile, const void* base, int64_t stride);
void store(int tile, void* base, int64_t stride);
// c += a b of bfloat16 pairs.
void multiply(int c, int a, int b);

}  // namespace tiles

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadconfig tiles::load_configuration
#define _tile_storeconfig tiles::store_configuration
#define _tile_release tiles::release
#define _tile_zero tiles::zero
#define _tile_loadd tiles::load
#define _tile_stored tiles::store
#define _tile_dpbf16ps tiles::multiply
