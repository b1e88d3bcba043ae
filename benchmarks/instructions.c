/* A plugin for qemu's user mode: how many instructions a program executes, and how many of them are multiply-adds of 128-bit vectors on Arm.
 *
 * It prints "INSTRUCTIONS MULTIPLIES" on standard error as the program ends. INTERFACE is qemu's plugin interface: 1 to 3. What is declared here
 * of it is what is used. Threads may lose counts to each other: programs are to have one.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef uint64_t plugin_id;
struct info {
  const char *target_name;
};
struct qemu_plugin_tb;
struct qemu_plugin_insn;
enum flags { NO_REGISTERS };

extern size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *block);
extern struct qemu_plugin_insn *qemu_plugin_tb_get_insn(const struct qemu_plugin_tb *block, size_t at);
extern size_t qemu_plugin_insn_size(const struct qemu_plugin_insn *instruction);
extern void qemu_plugin_register_vcpu_tb_trans_cb(plugin_id id, void (*translated)(plugin_id, struct qemu_plugin_tb *));
extern void qemu_plugin_register_vcpu_tb_exec_cb(struct qemu_plugin_tb *block, void (*entered)(unsigned, void *),
                                                 enum flags flags, void *data);
extern void qemu_plugin_register_atexit_cb(plugin_id id, void (*ended)(plugin_id, void *), void *data);
#if INTERFACE >= 3
extern size_t qemu_plugin_insn_data(const struct qemu_plugin_insn *instruction, void *to, size_t size);
#else
extern const void *qemu_plugin_insn_data(const struct qemu_plugin_insn *instruction);
#endif

__attribute__((visibility("default"))) int qemu_plugin_version = INTERFACE;

struct counts {
  uint64_t instructions, multiplies;
};

static struct counts total;

struct encoding {
  uint32_t fixed, bits;
};

/* Arm Architecture Reference Manuals: FMLA of float32 and SDOT, by vector and by element, and SMMLA; of 32-bit Arm VFMA.F32. */
static const struct encoding arm64[] = {
    {0xffe0fc00, 0x4e20cc00}, {0xffc0f400, 0x4f801000}, {0xffe0fc00, 0x4e809400},
    {0xffc0f400, 0x4f80e000}, {0xffe0fc00, 0x4e80a400}, {0, 1},
};
static const struct encoding arm32[] = {{0xffb00f50, 0xf2000c50}, {0, 1}};
static const struct encoding none[] = {{0, 1}};
static const struct encoding *encodings = none;

static bool multiplies(const struct qemu_plugin_insn *instruction) {
  uint32_t word = 0;
  if (qemu_plugin_insn_size(instruction) != sizeof word)
    return false;
#if INTERFACE >= 3
  qemu_plugin_insn_data(instruction, &word, sizeof word);
#else
  memcpy(&word, qemu_plugin_insn_data(instruction), sizeof word);
#endif
  for (const struct encoding *one = encodings; one->fixed; one++)
    if ((word & one->fixed) == one->bits)
      return true;
  return false;
}

static void entered(unsigned core, void *data) {
  (void)core;
  const struct counts *block = data;
  total.instructions += block->instructions;
  total.multiplies += block->multiplies;
}

/* A block's counts are kept for as long as the program runs, which may enter it again. */
static void translated(plugin_id id, struct qemu_plugin_tb *block) {
  (void)id;
  struct counts *counts = calloc(1, sizeof *counts);
  if (!counts)
    abort();
  counts->instructions = qemu_plugin_tb_n_insns(block);
  for (size_t i = 0; i < counts->instructions; i++)
    counts->multiplies += multiplies(qemu_plugin_tb_get_insn(block, i));
  qemu_plugin_register_vcpu_tb_exec_cb(block, entered, NO_REGISTERS, counts);
}

static void ended(plugin_id id, void *data) {
  (void)id, (void)data;
  fprintf(stderr, "%llu %llu\n", (unsigned long long)total.instructions, (unsigned long long)total.multiplies);
}

__attribute__((visibility("default"))) int qemu_plugin_install(plugin_id id, const struct info *info, int argc,
                                                               char **argv) {
  (void)argc, (void)argv;
  encodings = !strcmp(info->target_name, "aarch64") ? arm64 : !strcmp(info->target_name, "arm") ? arm32 : none;
  qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
  qemu_plugin_register_atexit_cb(id, ended, NULL);
  return 0;
}
