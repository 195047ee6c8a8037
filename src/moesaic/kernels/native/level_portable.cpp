#define MOESAIC_LEVEL_TABLE portable_level
#include "level.inc"
