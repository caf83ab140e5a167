// Writes a random two-layer Llama folder and a token file: make_inputs OUT_DIR
#include <orlop/token_writer.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <string>
#include <vector>

namespace {

constexpr int kVocab = 64, kHidden = 32, kInner = 64, kKeyValue = 16, kLayers = 2;

std::map<std::string, std::vector<int>> tensor_shapes() {
  std::map<std::string, std::vector<int>> shapes = {
      {"model.embed_tokens.weight", {kVocab, kHidden}}, {"model.norm.weight", {kHidden}}};
  for (int i = 0; i < kLayers; ++i) {
    const std::string layer = "model.layers." + std::to_string(i) + ".";
    shapes[layer + "input_layernorm.weight"] = {kHidden};
    shapes[layer + "post_attention_layernorm.weight"] = {kHidden};
    shapes[layer + "self_attn.q_proj.weight"] = {kHidden, kHidden};
    shapes[layer + "self_attn.k_proj.weight"] = {kKeyValue, kHidden};
    shapes[layer + "self_attn.v_proj.weight"] = {kKeyValue, kHidden};
    shapes[layer + "self_attn.o_proj.weight"] = {kHidden, kHidden};
    shapes[layer + "mlp.gate_proj.weight"] = {kInner, kHidden};
    shapes[layer + "mlp.up_proj.weight"] = {kInner, kHidden};
    shapes[layer + "mlp.down_proj.weight"] = {kHidden, kInner};
  }
  return shapes;
}

void write_weights(const std::filesystem::path& path) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0.0f, 0.05f);
  std::string header = "{", separator;
  std::vector<float> data;
  for (const auto& [name, shape] : tensor_shapes()) {
    const size_t begin = data.size() * sizeof(float);
    const size_t numel =
        static_cast<size_t>(shape[0]) * (shape.size() > 1 ? static_cast<size_t>(shape[1]) : 1);
    const float mean = shape.size() == 1 ? 1.0f : 0.0f;
    for (size_t i = 0; i < numel; ++i) data.push_back(mean + normal(random));
    std::string dims = std::to_string(shape[0]);
    if (shape.size() > 1) dims += "," + std::to_string(shape[1]);
    header += separator + "\"" + name + "\":{\"dtype\":\"F32\",\"shape\":[" + dims +
              "],\"data_offsets\":[" + std::to_string(begin) + "," +
              std::to_string(data.size() * sizeof(float)) + "]}";
    separator = ",";
  }
  header += "}";
  header.append((8 - header.size() % 8) % 8, ' ');
  const uint64_t length = header.size();
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(&length), sizeof(length));
  file << header;
  file.write(reinterpret_cast<const char*>(data.data()),
             static_cast<std::streamsize>(data.size() * sizeof(float)));
}

}  // namespace

int main(int, char** argv) {
  const std::filesystem::path folder = argv[1];
  std::filesystem::create_directories(folder / "model");
  std::ofstream(folder / "model/config.json") << R"({
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": true, "bos_token_id": 0,
    "eos_token_id": 0, "torch_dtype": "float32"})";
  write_weights(folder / "model/model.safetensors");

  orlop::TokenWriter writer((folder / "data.tok").string(), {.vocab_size = kVocab});
  for (int document = 0; document < 200; ++document) {
    std::vector<int32_t> tokens;
    for (int i = 0; i < 24; ++i) tokens.push_back((document % 5 + i * (1 + document % 3)) % kVocab);
    writer.append(tokens);
  }
  writer.finish();
}
