// Prints the embedding of a sentence, as embed.c does: embed_cpp model.coda 101 7592 2088 102
#include <cstdlib>
#include <iostream>
#include <string>
#include <vector>

#include "coda.hpp"

int main(int count, char **words) {
  if (count < 3) {
    std::cerr << "usage: embed_cpp model.coda TOKEN...\n";
    return 2;
  }
  try {
    const coda::Model model(words[1]);
    coda::Session session(model);
    std::vector<std::int64_t> ids, ones(static_cast<std::size_t>(count - 2), 1), zeros(ones.size());
    for (int i = 2; i < count; i++)
      ids.push_back(std::atoll(words[i]));
    const auto tokens = static_cast<std::int64_t>(ids.size());
    std::vector<coda::Tensor> inputs;
    for (std::size_t i = 0; i < model.inputs(); i++) {
      const std::string name = model.input(i).name;
      const bool mask = name.find("mask") != name.npos, types = name.find("type") != name.npos;
      inputs.push_back(coda::tensor((mask ? ones : types ? zeros : ids).data(), {1, tokens}));
    }
    const std::vector<coda::Tensor> outputs = session.run(inputs);
    const float *hidden = outputs[0].as<const float>();
    const std::int64_t width = outputs[0].shape()[2];
    for (std::int64_t k = 0; k < width; k++) {
      float sum = 0;
      for (std::int64_t i = 0; i < tokens; i++)
        sum += hidden[i * width + k];
      std::cout << std::fixed << sum / static_cast<float>(tokens) << "\n";
    }
  } catch (const std::exception &e) {
    std::cerr << "embed_cpp: " << e.what() << "\n";
    return 1;
  }
}
