#include <fmt/core.h>

#include <algorithm>
#include <memory>
#include <set>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include <mica/autograd/detail/slot.h>
#include <mica/autograd/graph_picture.h>

namespace mica::autograd {

namespace {

// "1.5 KiB".
std::string bytes_text(std::size_t bytes) {
  if (bytes < 1024) {
    return fmt::format("{} B", bytes);
  }
  double value = static_cast<double>(bytes) / 1024;
  std::size_t unit = 0;
  constexpr const char* units[] = {"KiB", "MiB", "GiB", "TiB"};
  for (; value >= 1024 && unit + 1 < std::size(units); ++unit) {
    value /= 1024;
  }
  std::string digits = fmt::format("{:.1f}", value);
  if (digits.ends_with(".0")) {
    digits.resize(digits.size() - 2);
  }
  return fmt::format("{} {}", digits, units[unit]);
}

// Quoted for DOT; `end` is the line break: "\\n" for centered text, "\\l" for left-aligned.
std::string quoted(const std::string& text, const char* end = "\\n") {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '\n') {
      result += end;
    } else {
      result += c == '"' || c == '\\' ? std::string{'\\', c} : std::string{c};
    }
  }
  return result + "\"";
}

// Every node reachable from the root, once, nearest first.
std::vector<const Node*> reachable_nodes(const Node* root) {
  std::vector<const Node*> nodes{root};
  std::unordered_set<const Node*> seen{root};
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    for (const Edge& edge : nodes[i]->edges) {
      if (edge.node != nullptr && seen.insert(edge.node.get()).second) {
        nodes.push_back(edge.node.get());
      }
    }
  }
  return nodes;
}

// The ops, oldest first, each preceded by the leaves that it is the first to use.
std::vector<const Node*> in_order_of_forward(std::vector<const Node*> nodes) {
  const auto leaves = std::stable_partition(nodes.begin(), nodes.end(), [](const Node* node) { return !node->leaf(); });
  std::unordered_set<const Node*> waiting(leaves, nodes.end());
  nodes.erase(leaves, nodes.end());
  std::sort(nodes.begin(), nodes.end(), [](const Node* a, const Node* b) { return a->sequence() < b->sequence(); });
  std::vector<const Node*> ordered;
  for (const Node* node : nodes) {
    for (const Edge& edge : node->edges) {
      if (waiting.erase(edge.node.get()) > 0) {
        ordered.push_back(edge.node.get());
      }
    }
    ordered.push_back(node);
  }
  return ordered;
}

// A frozen leaf, which no edge leads to.
bool is_parameter(const Tensor& x) {
  const Slot* const slot = find_slot(x);
  return slot != nullptr && slot->node == nullptr && slot->notes != nullptr && !slot->notes->name.empty();
}

using Bytes = std::unordered_map<const Node*, std::size_t>;

// Bytes saved by each node, except those of leaves and those already counted at an earlier node.
Bytes saved_bytes(const std::vector<const Node*>& nodes) {
  std::unordered_set<const Storage*> seen;
  for (const Node* node : nodes) {
    seen.insert(node->leaf_storage().get());
  }
  Bytes bytes;
  for (const Node* node : nodes) {
    for (const Tensor& saved : node->saved_tensors()) {
      if (saved.defined() && !is_parameter(saved) && seen.insert(saved.handle()->storage.get()).second) {
        bytes[node] += saved.handle()->storage->bytes();
      }
    }
  }
  return bytes;
}

std::string counted(std::size_t number, const char* one, const char* several) {
  return fmt::format("{} {}", number, number == 1 ? one : several);
}

std::string saves(std::size_t bytes) { return bytes == 0 ? "" : "\nsaves " + bytes_text(bytes); }

std::string shape_text(const OutputInfo& output) { return fmt::format("{} {}", output.shape, output.dtype); }

// The module that a node is drawn in; for a leaf, the module that registered it.
std::shared_ptr<const ModuleName> module_of(const Node& node) {
  const std::shared_ptr<Slot> leaf = node.leaf();
  return leaf == nullptr ? node.module : leaf->notes ? leaf->notes->module : nullptr;
}

std::string label_of(const Node& node, std::size_t bytes) {
  constexpr std::size_t kMaxOutputs = 4;
  const std::shared_ptr<Slot> leaf = node.leaf();
  std::string label = leaf == nullptr                             ? node.name()
                      : leaf->notes && !leaf->notes->name.empty() ? leaf->notes->name
                                                                  : "input";
  for (std::size_t k = 0; k < std::min(node.outputs.size(), kMaxOutputs); ++k) {
    label += "\n" + shape_text(node.outputs[k]);
  }
  if (node.outputs.size() > kMaxOutputs) {
    label += fmt::format("\nand {} more outputs", node.outputs.size() - kMaxOutputs);
  }
  return label + saves(bytes);
}

// Whether several outputs can receive a gradient.
bool has_several_outputs(const Node& node) {
  return std::count_if(node.outputs.begin(), node.outputs.end(),
                       [](const OutputInfo& output) { return is_floating(output.dtype); }) > 1;
}

// The frame of a module.
struct ModuleFrame {
  const ModuleName* module = nullptr;  // null for the whole picture
  std::size_t bytes = 0;               // saved by the ops inside
  std::vector<const Node*> nodes;
  std::vector<std::size_t> frames;  // frame numbers
};

class Picture {
 public:
  Picture(const Node* root, GraphPictureOptions options);

  std::string dot();

 private:
  std::size_t frame_of(const ModuleName* module);
  void count(const Node& node, std::size_t bytes);
  void draw_frame(std::size_t number, int depth);
  void draw_node(const Node& node, int depth);
  void draw_edges();
  std::string title() const;

  template <class... Args>
  void line(int depth, fmt::format_string<Args...> format, Args&&... args) {
    text_.append(2 * static_cast<std::size_t>(depth), ' ');
    text_ += fmt::format(format, std::forward<Args>(args)...) + "\n";
  }

  const Node* root_;
  std::vector<const Node*> nodes_;  // all nodes
  Bytes bytes_;
  std::vector<const Node*> drawn_;                        // in order of forward
  std::unordered_map<const Node*, std::size_t> numbers_;  // … and their positions there
  std::vector<ModuleFrame> frames_{ModuleFrame{}};        // the first is the whole picture
  std::unordered_map<const ModuleName*, std::size_t> frame_numbers_{{nullptr, 0}};
  std::string text_;
};

Picture::Picture(const Node* root, GraphPictureOptions options) : root_(root), nodes_(reachable_nodes(root)) {
  drawn_.assign(nodes_.begin(),
                nodes_.begin() + static_cast<std::ptrdiff_t>(std::min(nodes_.size(), options.max_nodes)));
  nodes_ = in_order_of_forward(std::move(nodes_));
  drawn_ = in_order_of_forward(std::move(drawn_));
  bytes_ = saved_bytes(nodes_);
  for (std::size_t i = 0; i < drawn_.size(); ++i) {
    numbers_.emplace(drawn_[i], i);
    frames_[frame_of(module_of(*drawn_[i]).get())].nodes.push_back(drawn_[i]);
  }
  for (const auto& [node, bytes] : bytes_) {
    count(*node, bytes);
  }
}

std::size_t Picture::frame_of(const ModuleName* module) {
  if (module != nullptr && path_of(*module).empty() && type_of(*module).empty()) {
    return 0;  // an outermost module without a Scope has no name
  }
  if (const auto at = frame_numbers_.find(module); at != frame_numbers_.end()) {
    return at->second;
  }
  const std::size_t above = frame_of(module->parent.get());
  const std::size_t number = frames_.size();
  frames_.push_back({.module = module, .bytes = 0, .nodes = {}, .frames = {}});
  frames_[above].frames.push_back(number);
  frame_numbers_.emplace(module, number);
  return number;
}

// Adds the bytes that a node saves to all drawn frames around it.
void Picture::count(const Node& node, std::size_t bytes) {
  for (const ModuleName* module = module_of(node).get(); module != nullptr; module = module->parent.get()) {
    if (const auto frame = frame_numbers_.find(module); frame != frame_numbers_.end()) {
      frames_[frame->second].bytes += bytes;
    }
  }
}

void Picture::draw_node(const Node& node, int depth) {
  line(depth, "n{} [label={}{}{}];", numbers_.at(&node),
       quoted(label_of(node, bytes_.contains(&node) ? bytes_.at(&node) : 0)),
       node.leaf() == nullptr ? "" : ", fillcolor=\"#fbe9b7\"", &node == root_ ? ", penwidth=2" : "");
}

void Picture::draw_frame(std::size_t number, int depth) {
  const ModuleFrame& frame = frames_[number];
  if (frame.module != nullptr) {
    line(depth++, "subgraph cluster_{} {{", number);
    line(depth, "label={};", quoted(describe(*frame.module) + saves(frame.bytes) + "\n", "\\l"));
  }
  for (const Node* node : frame.nodes) {
    draw_node(*node, depth);
  }
  for (const std::size_t inner : frame.frames) {
    draw_frame(inner, depth);
  }
  if (frame.module != nullptr) {
    line(depth - 1, "}}");
  }
}

void Picture::draw_edges() {
  std::set<std::size_t> after_more;  // drawn nodes that use nodes not drawn
  for (std::size_t to = 0; to < drawn_.size(); ++to) {
    for (const Edge& edge : drawn_[to]->edges) {
      if (edge.node == nullptr) {
        continue;
      }
      const auto from = numbers_.find(edge.node.get());
      if (from == numbers_.end()) {
        after_more.insert(to);
        continue;
      }
      const std::string label =
          has_several_outputs(*edge.node) ? fmt::format(" [label=\"output {}\"]", edge.output) : "";
      line(1, "n{} -> n{}{};", from->second, to, label);
    }
  }
  if (nodes_.size() > drawn_.size()) {
    line(1, "more [label={}, style=dashed];", quoted(fmt::format("and {} more", nodes_.size() - drawn_.size())));
    for (const std::size_t to : after_more) {
      line(1, "more -> n{} [style=dashed];", to);
    }
  }
}

// Totals over the whole graph.
std::string Picture::title() const {
  std::size_t saved = 0, leaves = 0, leaf_bytes = 0;
  for (const Node* node : nodes_) {
    if (const auto at = bytes_.find(node); at != bytes_.end()) {
      saved += at->second;
    }
    if (node->leaf() != nullptr) {
      const OutputInfo& leaf = node->outputs[0];
      ++leaves;
      leaf_bytes += static_cast<std::size_t>(numel_of(leaf.shape)) * size_of(leaf.dtype);
    }
  }
  return fmt::format("{}, saving {} for backward; {} of {}", counted(nodes_.size() - leaves, "op", "ops"),
                     bytes_text(saved), counted(leaves, "leaf", "leaves"), bytes_text(leaf_bytes));
}

std::string Picture::dot() {
  line(0, "digraph autograd {{");
  line(1, "label={}; labelloc=t; fontname=\"Helvetica\"; fontsize=11;", quoted(title()));
  line(1,
       "style=\"rounded,filled\"; fillcolor=\"#00000009\"; color=\"#00000050\"; labeljust=l; ranksep=0.25; "
       "nodesep=0.2;");
  line(1,
       "node [shape=box, style=filled, fillcolor=white, fontname=\"Helvetica\", fontsize=10, height=0.1, "
       "margin=\"0.08,0.05\"];");
  line(1, "edge [fontname=\"Helvetica\", fontsize=9, arrowsize=0.6];");
  draw_frame(0, 1);
  draw_edges();
  line(0, "}}");
  return std::move(text_);
}

}  // namespace

std::string to_dot(const Tensor& output, GraphPictureOptions options) {
  check(output.defined(), "to_dot: expected a defined tensor, got an undefined one");
  const std::shared_ptr<Node> root = output.grad_fn();
  check(root != nullptr,
        "to_dot: there is no graph to draw: no recorded op made the tensor of shape {}; nothing it was computed from "
        "has requires_grad, or it was computed while recording was off",
        output.shape());
  return Picture(root.get(), options).dot();
}

}  // namespace mica::autograd
