#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>

#include <mica/train/detail/loss_plot.h>

namespace mica::train::detail {

namespace {

constexpr double width = 800, height = 480;
constexpr double left = 64, right = 776, top = 24, bottom = 424;
constexpr const char* train_color = "#1f77b4";
constexpr const char* validation_color = "#d62728";

// The distance between ticks: 1, 2 or 5 times a power of ten, chosen to give about `wanted` ticks.
double tick_distance(double range, int wanted) {
  const double rough = range / wanted;
  const double power = std::pow(10, std::floor(std::log10(rough)));
  for (const double factor : {1., 2., 5.}) {
    if (factor * power >= rough) {
      return factor * power;
    }
  }
  return 10 * power;
}

struct Axis {
  double low;
  double high;
  double tick;

  double at(double value, double from, double to) const { return from + (value - low) / (high - low) * (to - from); }
};

Axis loss_axis(const std::vector<LossPoint>& train, const std::vector<LossPoint>& validation) {
  double low = std::numeric_limits<double>::infinity();
  double high = -low;
  for (const auto* points : {&train, &validation}) {
    for (const LossPoint& point : *points) {
      if (std::isfinite(point.y)) {
        low = std::min(low, point.y);
        high = std::max(high, point.y);
      }
    }
  }
  if (low > high) {
    return {0, 1, 0.2};
  }
  const double tick = tick_distance(std::max(high - low, 1e-3), 6);
  return {std::floor(low / tick) * tick, std::ceil(high / tick) * tick + (high == low ? tick : 0), tick};
}

// Averages neighboring points, to return at most `most`.
std::vector<LossPoint> thinned(const std::vector<LossPoint>& points, std::size_t most) {
  const std::size_t each = (points.size() + most - 1) / most;
  std::vector<LossPoint> means;
  for (std::size_t begin = 0; begin < points.size(); begin += each) {
    const std::size_t end = std::min(points.size(), begin + each);
    LossPoint mean{0, 0};
    for (std::size_t i = begin; i < end; ++i) {
      mean.x += points[i].x / static_cast<double>(end - begin);
      mean.y += points[i].y / static_cast<double>(end - begin);
    }
    means.push_back(mean);
  }
  return means;
}

std::string text(double x, double y, const char* anchor, const std::string& content, const char* more = "") {
  return fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\"{}>{}</text>\n", x, y, anchor, more, content);
}

std::string line(double x1, double y1, double x2, double y2, const char* color, double stroke) {
  return fmt::format(
      "<line x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\" stroke=\"{}\" stroke-width=\"{}\"/>\n", x1, y1, x2,
      y2, color, stroke);
}

std::string curve(const std::vector<LossPoint>& points, const Axis& x, const Axis& y, const char* color,
                  double stroke) {
  std::string places;
  for (const LossPoint& point : points) {
    if (std::isfinite(point.y)) {
      places += fmt::format("{:.1f},{:.1f} ", x.at(point.x, left, right), y.at(point.y, bottom, top));
    }
  }
  return fmt::format(
      "<polyline points=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"{}\" stroke-linejoin=\"round\"/>\n", places,
      color, stroke);
}

}  // namespace

std::string loss_plot(const std::vector<LossPoint>& train, const std::vector<LossPoint>& validation) {
  double last = 1;
  for (const auto* points : {&train, &validation}) {
    if (!points->empty()) {
      last = std::max(last, points->back().x);
    }
  }
  const Axis x{0, last, std::max(1., tick_distance(last, 8))};
  const Axis y = loss_axis(train, validation);

  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" width=\"{0}\" height=\"{1}\" "
      "font-family=\"sans-serif\" font-size=\"13\" fill=\"#333\">\n"
      "<rect width=\"{0}\" height=\"{1}\" fill=\"white\"/>\n",
      width, height);

  for (int i = 0; i * x.tick <= x.high * (1 + 1e-9); ++i) {
    const double at = x.at(i * x.tick, left, right);
    svg += line(at, bottom, at, bottom + 5, "#333", 1);
    svg += text(at, bottom + 20, "middle", fmt::format("{:.6g}", i * x.tick));
  }
  for (int i = 0; y.low + i * y.tick <= y.high + y.tick * 1e-6; ++i) {
    const double value = y.low + i * y.tick;
    const double at = y.at(value, bottom, top);
    svg += line(left, at, right, at, "#e5e5e5", 1);
    svg += text(left - 8, at + 4.5, "end", fmt::format("{:.4g}", value));
  }
  svg += line(left, bottom, right, bottom, "#333", 1);
  svg += line(left, top, left, bottom, "#333", 1);
  svg += text((left + right) / 2, height - 14, "middle", "step");
  svg += text(18, (top + bottom) / 2, "middle", "loss",
              fmt::format(" transform=\"rotate(-90 18 {:.1f})\"", (top + bottom) / 2).c_str());

  svg += curve(thinned(train, 360), x, y, train_color, 1.5);
  svg += curve(validation, x, y, validation_color, 2);
  for (const LossPoint& point : validation) {
    if (std::isfinite(point.y)) {
      svg += fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3.5\" fill=\"{}\"/>\n", x.at(point.x, left, right),
                         y.at(point.y, bottom, top), validation_color);
    }
  }

  const double legend = right - 150;
  svg += line(legend, top + 20, legend + 28, top + 20, train_color, 2);
  svg += text(legend + 36, top + 24.5, "start", "training");
  svg += line(legend, top + 42, legend + 28, top + 42, validation_color, 2);
  svg += fmt::format("<circle cx=\"{}\" cy=\"{}\" r=\"3.5\" fill=\"{}\"/>\n", legend + 14, top + 42, validation_color);
  svg += text(legend + 36, top + 46.5, "start", "validation");
  return svg + "</svg>\n";
}

}  // namespace mica::train::detail
