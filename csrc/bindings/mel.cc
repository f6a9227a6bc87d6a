#include "kernels/mel/mel.h"

#include "bindings/tensor.h"

namespace tilewright {

void bind_mel(nb::module_& m) {
  using namespace nb::literals;
  m.def(
      "log_mel",
      [](nb::handle samples_arg, nb::handle filters_arg, nb::handle y_arg) {
        Op op("log_mel");
        constexpr DTypes floats = one_of({DType::f32});
        const Tensor samples = op.tensor(samples_arg, "samples", {"N"}, floats);
        const Tensor filters = op.tensor(filters_arg, "filters", {"M", "201"}, floats);
        const Tensor y = op.tensor(y_arg, "out", {"F", "M"}, floats);
        MelArgs args;
        args.samples = samples.as<float>();
        args.num_samples = op["N"];
        args.filters = op.rows(filters);
        args.y = op.rows(y);
        args.num_frames = op["F"];
        args.num_bins = op["M"];
        OP_REQUIRE(op, args.num_samples > kMelWindow / 2,
                   "there are " + std::to_string(args.num_samples) + " samples, expected 201 or more");
        OP_REQUIRE(op, args.num_frames == args.num_samples / kMelHop,
                   "out has " + std::to_string(args.num_frames) + " frames, expected " +
                       std::to_string(args.num_samples / kMelHop) + ", one for every 160 samples");
        launch(log_mel, args);
      },
      "samples"_a, "filters"_a, "out"_a);
}

}  // namespace tilewright
