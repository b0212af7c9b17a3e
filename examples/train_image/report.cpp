#include "examples/train_image/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <string_view>

#include <mica/core/creation.h>
#include <mica/io/image.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/softmax/softmax.h>

using namespace mica;

namespace {

// The encoding of RFC 4648.
std::string base64(const std::vector<std::byte>& bytes) {
  constexpr std::string_view digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string text;
  for (std::size_t i = 0; i < bytes.size(); i += 3) {
    const std::size_t left = std::min<std::size_t>(3, bytes.size() - i);
    std::uint32_t group = 0;
    for (std::size_t k = 0; k < 3; ++k) {
      group = group << 8 | (k < left ? std::to_integer<std::uint32_t>(bytes[i + k]) : 0);
    }
    for (std::size_t k = 0; k < 4; ++k) {
      text += k <= left ? digits[group >> (18 - 6 * k) & 63] : '=';
    }
  }
  return text;
}

std::string in_svg(std::string_view text) {
  std::string escaped;
  for (const char c : text) {
    escaped += c == '<' ? "&lt;" : c == '&' ? "&amp;" : std::string(1, c);
  }
  return escaped;
}

const std::string& name_of(const io::LabeledImages& images, std::int64_t label) {
  return images.classes[static_cast<std::size_t>(label)];
}

// The indices of wrong predictions, the most confident first.
std::vector<std::size_t> mistakes_of(const Predictions& predictions, const std::vector<std::int64_t>& labels) {
  std::vector<std::size_t> mistakes;
  for (std::size_t i = 0; i < labels.size(); ++i) {
    if (predictions.classes[i] != labels[i]) {
      mistakes.push_back(i);
    }
  }
  std::stable_sort(mistakes.begin(), mistakes.end(), [&](std::size_t a, std::size_t b) {
    return predictions.probabilities[a] > predictions.probabilities[b];
  });
  return mistakes;
}

}  // namespace

void Predictions::add(const Tensor& logits) {
  const Tensor p = softmax(logits.to(float32), -1);
  const std::vector<std::int64_t> best = to_vector<std::int64_t>(argmax(p, -1));
  const std::vector<float> highest = to_vector<float>(amax(p, {-1}));
  classes.insert(classes.end(), best.begin(), best.end());
  probabilities.insert(probabilities.end(), highest.begin(), highest.end());
}

double accuracy(const Predictions& predictions, const std::vector<std::int64_t>& labels) {
  return 1 - static_cast<double>(mistakes_of(predictions, labels).size()) / static_cast<double>(labels.size());
}

std::string confusion_table(const Predictions& predictions, const io::LabeledImages& images) {
  const std::size_t count = images.classes.size();
  std::vector<std::int64_t> table(count * count);
  for (std::size_t i = 0; i < images.labels.size(); ++i) {
    ++table[static_cast<std::size_t>(images.labels[i]) * count + static_cast<std::size_t>(predictions.classes[i])];
  }
  std::size_t width = 6;
  for (const std::string& name : images.classes) {
    width = std::max(width, name.size() + 1);
  }
  std::string text = fmt::format("{:{}}", "", width);
  for (const std::string& name : images.classes) {
    text += fmt::format("{:>{}}", name, width);
  }
  text += "   right\n";
  for (std::size_t row = 0; row < count; ++row) {
    std::int64_t all = 0;
    text += fmt::format("{:{}}", images.classes[row], width);
    for (std::size_t column = 0; column < count; ++column) {
      const std::int64_t number = table[row * count + column];
      all += number;
      text += fmt::format("{:>{}}", number, width);
    }
    const double right =
        all == 0 ? 0 : 100.0 * static_cast<double>(table[row * count + row]) / static_cast<double>(all);
    text += fmt::format("{:>6.1f} %\n", right);
  }
  return text;
}

std::string picture_of_mistakes(const Predictions& predictions, const io::LabeledImages& images, std::size_t most) {
  constexpr std::size_t columns = 10, side = 96, line = 14;
  std::vector<std::size_t> mistakes = mistakes_of(predictions, images.labels);
  const std::size_t all = mistakes.size();
  mistakes.resize(std::min(all, most));
  const std::size_t rows = (mistakes.size() + columns - 1) / columns;
  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{}\" height=\"{}\" font-family=\"sans-serif\" "
      "font-size=\"11\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
      "<text x=\"8\" y=\"16\">{} of {} are wrong. Predicted (right):</text>\n",
      columns * (side + 8) + 8, rows * (side + 2 * line + 10) + 28, all, images.labels.size());
  for (std::size_t i = 0; i < mistakes.size(); ++i) {
    const std::size_t at = mistakes[i], x = 8 + i % columns * (side + 8), y = 24 + i / columns * (side + 2 * line + 10);
    const io::Image image = images.image(static_cast<std::int64_t>(at));
    const std::int64_t longer = std::max(image.height(), image.width());
    // Large photographs would make a large file.
    const std::int64_t height =
                           std::max<std::int64_t>(1, image.height() * std::min<std::int64_t>(longer, side) / longer),
                       width = std::max<std::int64_t>(1, image.width() * std::min<std::int64_t>(longer, side) / longer);
    svg += fmt::format(
        "<image x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" style=\"image-rendering:pixelated\" "
        "href=\"data:image/png;base64,{}\"/>\n",
        x, y, side, side, base64(io::encode_png(image.resize(height, width))));
    svg += fmt::format("<text x=\"{}\" y=\"{}\">{} {:.0f} %</text><text x=\"{}\" y=\"{}\">({})</text>\n", x,
                       y + side + line, in_svg(name_of(images, predictions.classes[at])),
                       100 * predictions.probabilities[at], x, y + side + 2 * line,
                       in_svg(name_of(images, images.labels[at])));
  }
  return svg + "</svg>\n";
}
