// Every place of a scale: the project's against CuTe's layout of scales of block-scaled GEMMs, and of
// matrices and groups that no two scales have the same one.
#include <cstdio>
#include <vector>

#include "cutlass/detail/sm100_blockscaled_layout.hpp"
#include "fusegen/quantize/scale_atoms.cuh"

using namespace fusegen;

namespace {

long checked = 0;

template <int kBlock>
bool agrees_with_cute(int rows, int depth) {
  using Layout = cutlass::detail::Sm1xxBlockScaledConfig<kBlock>;
  const auto layout = Layout::tile_atom_to_shape_SFA(cute::make_shape(rows, 8, depth, 1));
  const int atoms = atoms_along(depth, kBlock);
  for (int m = 0; m < rows; ++m) {
    for (int k = 0; k < depth; ++k, ++checked) {
      if (long(layout(m, k, 0)) == atom_place(m, k / kBlock, atoms)) continue;
      std::printf("block %d, %d x %d: row %d, element %d lies at %ld, not at %ld\n", kBlock, rows, depth, m, k,
                  long(layout(m, k, 0)), long(atom_place(m, k / kBlock, atoms)));
      return false;
    }
  }
  const RowGroups one{nullptr, rows, 1};
  return long(cute::cosize(layout)) == long(atom_row_blocks(one)) * atoms * kAtomBytes;
}

// Of rows in groups, along rows and across them.
bool places_are_apart(const std::vector<int64_t>& sizes, int rows, int columns, int block) {
  const RowGroups groups{sizes.data(), rows, int32_t(sizes.size())};
  const int along = atoms_along(columns, block), across = atoms_along_rows(groups, block);
  std::vector<char> rowwise(size_t(atom_row_blocks(groups)) * along * kAtomBytes);
  std::vector<char> columnwise(size_t((columns + kAtomRows - 1) / kAtomRows) * across * kAtomBytes);
  int begin = 0;
  for (size_t g = 0; g < sizes.size(); ++g) {
    const int start = start_of(begin, int32_t(g), kAtomSpace);
    if (start % kAtomRows != 0) return false;
    for (int row = 0; row < sizes[g]; ++row) {
      for (int b = 0; b * block < columns; ++b, ++checked) {
        char& at = rowwise.at(size_t(atom_place(start + row, b, along)));
        if (at++ != 0) return std::printf("row %d, block %d of group %zu is taken\n", row, b, g), false;
      }
    }
    for (int column = 0; column < columns; ++column) {
      for (int row = 0; row < sizes[g]; row += block, ++checked) {
        char& at = columnwise.at(size_t(atom_place(column, (start + row) / block, across)));
        if (at++ != 0) return std::printf("column %d, row %d of group %zu is taken\n", column, row, g), false;
      }
    }
    begin += int(sizes[g]);
  }
  return true;
}

}  // namespace

int main() {
  for (int rows : {1, 31, 128, 129, 300}) {
    for (int depth : {1, 16, 17, 32, 33, 64, 128, 293, 1000}) {
      if (!agrees_with_cute<32>(rows, depth) || !agrees_with_cute<16>(rows, depth)) return 1;
    }
  }
  for (const std::vector<int64_t>& sizes :
       {std::vector<int64_t>{0, 5, 130, 0, 33}, {128, 128, 44}, {1, 1, 1, 1}, {0, 0, 300}, {300, 0}, {127, 129}}) {
    for (int block : {16, 32}) {
      if (!places_are_apart(sizes, 300, 136, block)) return 1;
    }
  }
  std::printf("%ld places\n", checked);
  return 0;
}
