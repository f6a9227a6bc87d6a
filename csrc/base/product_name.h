// What a kernel multiplies, as its name says it: the types of the left operand, of the right one and of the sums, and
// how many rows, columns and depths are multiplied at a time, "bf16_bf16_fp32_32x32x32".
#pragma once

namespace tilewright {
namespace {

struct ProductName {
  char text[48] = {};

  consteval ProductName(const char* types, int rows, int columns, int depths) {
    char* end = text;
    while (*types) *end++ = *types++;
    *end++ = '_';
    end = append(end, rows);
    *end++ = 'x';
    end = append(end, columns);
    *end++ = 'x';
    append(end, depths);
  }

 private:
  static consteval char* append(char* end, int number) {
    if (number >= 10) end = append(end, number / 10);
    *end++ = static_cast<char>('0' + number % 10);
    return end;
  }
};

}  // namespace
}  // namespace tilewright
