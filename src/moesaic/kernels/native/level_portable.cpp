#define MOESAIC_LEVEL_TABLE portable_level
#include "linear.inc"
