// Causal convolution and the gated delta rule over slots of state, float32 inside; levels agree. Products and sums are
// rounded one by one:
//
//   conv    input * weight, oldest first, from +0; inputs are rounded to the tails' kind before
//   delta   S = decay * S;  held = sum over c of k[c] * S[c];  S[c] = S[c] + k[c] * ((v - held) * beta);
//           y = sum over c of q[c] * S[c];   sums ascend over c, from +0;   decay = exp(log decay)
//
// A state is read from one slot and written to another. Tokens of a sequence come one after the other, channels and
// columns each by itself: nothing knows of other sequences, chunks or threads.
#pragma once

#include <cstddef>
#include <cstdint>

#include "linear.hpp"

namespace moesaic {

// Tokens [first_token, first_token + num_tokens) of a sequence; slot_from -1: it begins.
struct StateRow {
  int64_t first_token, num_tokens, slot_from, slot_to;
};

struct Conv {
  const void* x;       // [tokens, channels], contiguous, of `kind`
  const void* weight;  // [channels, taps], contiguous, of `weight_kind`
  void* tails;         // [slots, taps - 1, channels], of `tail_kind`
  void* y;             // [tokens, channels], of `out`
  const StateRow* rows;
  int64_t num_rows, channels, taps;
  Kind kind, weight_kind, tail_kind, out;
};

struct Delta {
  const float *q, *k;  // [tokens, groups, key_width]
  const float* v;      // [tokens, heads, value_width]
  const float *log_decay, *beta;  // [tokens, heads]
  float* states;                  // [slots, heads, key_width, value_width]
  void* y;                        // [tokens, heads, value_width], of `out`
  const StateRow* rows;
  int64_t num_rows, heads, groups, key_width, value_width;
  Kind out;
};

}  // namespace moesaic
