#pragma once

#include <string>
#include <vector>

namespace mica::train::detail {

/// One value of a curve: the step and the loss.
struct LossPoint {
  double x;
  double y;
};

/// An SVG plot of training: the loss of each step (averaged where points are closer than a pixel) and the validation
/// losses, over the steps, with axes and a legend.
std::string loss_plot(const std::vector<LossPoint>& train, const std::vector<LossPoint>& validation);

}  // namespace mica::train::detail
