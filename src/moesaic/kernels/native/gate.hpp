// A router's gate: from logits to the experts of each row, ascending, and their weights. Float32; levels agree.
//
//   softmax    exp(logit - greatest) / their sum, as in norm.hpp;   sigmoid    1 / (1 + exp(-logit))
//   groups     ranked by their greatest choice or the sum of their two greatest; experts of the others are out
//   choice     score + selection bias; the greatest, of equals the lowest id; NaN counts as infinity
//   weights    scores of the chosen, or the score of their logits; / max(sum, ascending by id, + epsilon, floor);
//              * scale; * the expert's own scale
#pragma once

#include <cstddef>
#include <cstdint>

namespace moesaic {

struct Gate {
  const float* logits;          // [rows, experts]
  const float* selection_bias;  // [experts] or null
  const float* expert_scale;    // [experts] or null
  int64_t* ids;                 // [rows, chosen]
  float* weights;               // [rows, chosen]
  int64_t rows, experts, chosen, groups, groups_kept;
  bool is_sigmoid, is_topk_first, is_top2_sum, is_renormalised;
  float epsilon, floor, scale;
};

}  // namespace moesaic
