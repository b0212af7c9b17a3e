// Reads the images of a folder as for training: decodes, crops and resizes, flips and normalizes them. Reports the time
// of one thread per image; image_peers.py compares it with torchvision's.

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <ctime>
#include <string>

#include "examples/common/command_line.h"
#include <mica/io/data_loader.h>
#include <mica/io/image_dataset.h>

using namespace mica;

int main(int argc, char** argv) {
  CommandLine command_line("Reads and augments the images of a folder and reports the time per image.", "bench_images");
  std::string folder;
  int epochs = 3, size = 224, workers = 0;
  command_line.add_option("--folder", folder, "Folder with a folder of JPEG or PNG files for each class").required();
  command_line.add_option("--epochs", epochs, "Number of passes; the fastest counts").at_least(1);
  command_line.add_option("--size", size, "Height and width of the crops").at_least(1);
  command_line.add_option("--workers", workers, "Threads that read; 0: the main thread").at_least(0);
  return command_line.run(argc, argv, [&] {
    const auto augment = io::in_order(
        {io::RandomResizedCrop{size}, io::RandomFlip{}, io::Normalize{{0.485, 0.456, 0.406}, {0.229, 0.224, 0.225}}});
    const io::ImageDataset data(io::image_folder(folder), {.transform = augment, .seed = 1});
    const io::DataLoader loader(data, {.batch = 32, .seed = 1, .workers = workers});
    double least_work = 1e30, least = 1e30;
    for (int epoch = 0; epoch < epochs; ++epoch) {
      const std::clock_t before = std::clock();
      const auto start = std::chrono::steady_clock::now();
      for (const Tensors& batch : loader.epoch(epoch)) {
        check(batch[0].size(1) == 3, "expected RGB images");
      }
      least = std::min(least, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
      least_work = std::min(least_work, static_cast<double>(std::clock() - before) / CLOCKS_PER_SEC);
    }
    const auto images = static_cast<double>(data.size());
    fmt::print("{} images: {:.3f} ms of CPU time per image, {:.0f} images/s\n", data.size(), 1e3 * least_work / images,
               images / least);
  });
}
