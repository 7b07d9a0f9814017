// Classifies rows of token ids with an exported folder: classify DIR [threshold] < ids.txt, one row per line: "101 1037 2204 102".
// Prints for each row the index of the label, the number of layers and the confidence. README.md says how to build it.
#include <onnxruntime_cxx_api.h>
#include <cstdlib>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>
static Ort::AllocatorWithDefaultOptions allocator;

// Whether the rule of the graph has a threshold.
static bool has_threshold(const Ort::Session& session) {
  for (size_t i = 0; i < session.GetOverridableInitializerCount(); i++)
    if (session.GetOverridableInitializerNameAllocated(i, allocator).get() == std::string("threshold")) return true;
  return false;
}
int main(int argc, char** argv) try {
  if (argc < 2) throw std::invalid_argument("usage: classify DIR [threshold] < ids.txt");
  Ort::Env env(ORT_LOGGING_LEVEL_ERROR);
  Ort::Session session(env, (std::string(argv[1]) + "/onnx/model.onnx").c_str(), Ort::SessionOptions());
  std::vector<std::string> required;  // names of the inputs without a default
  for (size_t i = 0; i < session.GetInputCount(); i++) required.push_back(session.GetInputNameAllocated(i, allocator).get());
  char* end = nullptr;
  float threshold = argc > 2 ? std::strtof(argv[2], &end) : 0;
  if (end && (end == argv[2] || *end || threshold != threshold))
    throw std::invalid_argument(std::string("expected a threshold, found: ") + argv[2]);
  if (argc > 2 && !has_threshold(session)) throw std::invalid_argument("the rule of this graph has no threshold");
  const auto memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
  const char* outputs[] = {"label", "layers", "confidence"};
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    std::vector<int64_t> ids;
    bool valid = true;
    for (std::string word; valid && words >> word;)
      if ((valid = word.size() < 19 && word.find_first_not_of("0123456789") == word.npos)) ids.push_back(std::stoll(word));
    if (ids.empty() || !valid) throw std::invalid_argument("expected token ids in each line, found: " + line);
    std::vector<int64_t> ones(ids.size(), 1), zeros(ids.size(), 0), shape{1, int64_t(ids.size())};
    std::vector<const char*> names;
    std::vector<Ort::Value> values;
    for (const auto& name : required) {
      auto& row = name == "input_ids" ? ids : name == "attention_mask" ? ones : zeros;  // zeros: the token types
      names.push_back(name.c_str());
      values.push_back(Ort::Value::CreateTensor<int64_t>(memory, row.data(), row.size(), shape.data(), shape.size()));
    }
    if (argc > 2) {  // no axes: one number for all exits. (rows, exits - 1) has one for each row and exit but the last
      names.push_back("threshold");
      values.push_back(Ort::Value::CreateTensor<float>(memory, &threshold, 1, nullptr, 0));
    }
    auto found = session.Run(Ort::RunOptions(), names.data(), values.data(), names.size(), outputs, 3);
    std::cout << *found[0].GetTensorData<int64_t>() << ' ' << *found[1].GetTensorData<int64_t>();
    std::cout << ' ' << *found[2].GetTensorData<float>() << std::endl;
  }
} catch (const std::exception& error) {
  std::cerr << error.what() << std::endl;
  return 1;
}
