#define MOESAIC_LEVEL_AVX2
#define MOESAIC_LEVEL_TABLE avx2_level
#include "level.inc"
