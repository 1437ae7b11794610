/* Tile instructions of AMX on a CPU that has none: for LD_PRELOAD on Linux, x86-64.

   The CPU raises SIGILL at such an instruction; the handler decodes it, does what it would have done to tiles in memory,
   and goes on behind it. Known are those that the kernels use: ldtilecfg, tilerelease, tilezero, tileloadd, tilestored
   and tdpbf16ps. Whatever a real CPU would refuse ends the process with a line on stderr. A program that asks Linux for
   room for tiles hears yes. At the end, the number of products is appended to the file that AMX_PRODUCTS names.

   Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2: instruction format, VEX prefix, and
   the six instructions. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>
#include <unistd.h>

enum { TILES = 8, ROWS = 16, ROW_BYTES = 64, PALETTE = 1 };
enum { ARCH_PRCTL_CALL = 158, REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };

struct tile {
    int rows, row_bytes; /* 0: not configured */
    uint8_t data[ROWS][ROW_BYTES];
};

/* What VEX and ModRM say. */
struct instruction {
    int opcode, prefix; /* 0: none, 1: 66, 2: F3, 3: F2 */
    int reg, rm, vvvv;
    int is_memory, has_index;
    uint64_t base, offset; /* offset: the index, scaled, which tiles take for the distance of their rows */
    int length;
};

static __thread struct tile tiles[TILES] __attribute__((tls_model("initial-exec")));
static long long products;
static struct sigaction before;

static void refuse(const char *reason) {
    dprintf(STDERR_FILENO, "AMX: %s\n", reason);
    abort();
}

static uint64_t register_value(ucontext_t *context, int number) {
    static const int order[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                  REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
    return (uint64_t)context->uc_mcontext.gregs[order[number]];
}

static int64_t displacement(const uint8_t *at, int bytes) {
    int32_t wide;
    if (bytes == 1) return (int8_t)*at;
    memcpy(&wide, at, 4);
    return wide;
}

/* ModRM at code[4], and what follows. */
static void decode_memory(const uint8_t *code, ucontext_t *context, struct instruction *found) {
    int mode = code[4] >> 6, high_index = code[1] & 0x40 ? 0 : 8, high_base = code[1] & 0x20 ? 0 : 8;
    int base = code[4] & 7, bytes = mode == 1 ? 1 : mode == 2 ? 4 : 0, is_relative = 0, has_base = 1;
    if (base == 4) {
        int sib = code[found->length++], index = (sib >> 3 & 7) | high_index;
        base = sib & 7;
        if (index != 4) {
            found->has_index = 1;
            found->offset = register_value(context, index) << (sib >> 6);
        }
        if (base == 5 && mode == 0) has_base = 0, bytes = 4;
    } else if (base == 5 && mode == 0) {
        has_base = 0, is_relative = 1, bytes = 4;
    }
    if (has_base) found->base = register_value(context, base | high_base);
    if (bytes) found->base += displacement(code + found->length, bytes);
    found->length += bytes;
    if (is_relative) found->base += (uint64_t)(code + found->length);
}

/* Whether it is of the VEX family that tiles' instructions belong to: map 0F38, 128 bits, W0. */
static int decode(const uint8_t *code, ucontext_t *context, struct instruction *found) {
    memset(found, 0, sizeof *found);
    if (code[0] != 0xC4 || (code[1] & 0x1F) != 2 || code[2] & 0x84) return 0;
    found->prefix = code[2] & 3;
    found->vvvv = ~(code[2] >> 3) & 15;
    found->opcode = code[3];
    found->reg = code[4] >> 3 & 7;
    found->rm = code[4] & 7;
    found->is_memory = code[4] >> 6 != 3;
    found->length = 5;
    if (found->is_memory) decode_memory(code, context, found);
    return 1;
}

static struct tile *configured(int number) {
    if (number >= TILES || !tiles[number].rows) refuse("a tile that is not configured");
    return &tiles[number];
}

static void configure(const uint8_t *wanted) {
    static const uint8_t reserved[64] = {[2 ... 15] = 1, [32 ... 47] = 1, [56 ... 63] = 1};
    if (wanted[0] != PALETTE) refuse("a palette that there is not");
    for (int i = 0; i < 64; i++)
        if (reserved[i] && wanted[i]) refuse("reserved bytes of a configuration that are not zero");
    memset(tiles, 0, sizeof tiles);
    for (int i = 0; i < TILES; i++) {
        int row_bytes = wanted[16 + 2 * i] | wanted[17 + 2 * i] << 8, rows = wanted[48 + i];
        if (rows > ROWS || row_bytes > ROW_BYTES || !rows != !row_bytes) refuse("a tile that is too large, or half empty");
        tiles[i].rows = rows;
        tiles[i].row_bytes = row_bytes;
    }
}

static void move(const struct instruction *found, int is_store) {
    struct tile *tile = configured(found->reg);
    if (!is_store) memset(tile->data, 0, sizeof tile->data);
    for (int row = 0; row < tile->rows; row++) {
        void *memory = (void *)(found->base + row * found->offset);
        memcpy(is_store ? memory : tile->data[row], is_store ? tile->data[row] : memory, tile->row_bytes);
    }
}

/* Subnormal numbers count as zero. */
static float widen(const uint8_t *place) {
    uint32_t bits = (uint32_t)place[0] << 16 | (uint32_t)place[1] << 24;
    float value;
    if (!(bits & 0x7F800000)) bits &= 0x80000000;
    memcpy(&value, &bits, 4);
    return value;
}

/* sum[row][n] += left[row][2k] * right[k][2n] + left[row][2k + 1] * right[k][2n + 1], even and odd added apart. */
static void multiply(int to, int from_left, int from_right) {
    struct tile *sum = configured(to), *left = configured(from_left), *right = configured(from_right);
    if (sum == left || sum == right || left == right) refuse("a product with one tile in two roles");
    if (sum->rows != left->rows || sum->row_bytes != right->row_bytes || left->row_bytes / 4 != right->rows)
        refuse("a product of tiles that do not fit");
    for (int row = 0; row < sum->rows; row++)
        for (int n = 0; n < sum->row_bytes / 4; n++) {
            float even = 0, odd = 0, total;
            for (int k = 0; k < right->rows; k++) {
                even = fmaf(widen(left->data[row] + 4 * k), widen(right->data[k] + 4 * n), even);
                odd = fmaf(widen(left->data[row] + 4 * k + 2), widen(right->data[k] + 4 * n + 2), odd);
            }
            memcpy(&total, sum->data[row] + 4 * n, 4);
            total += even + odd;
            memcpy(sum->data[row] + 4 * n, &total, 4);
        }
    __atomic_add_fetch(&products, 1, __ATOMIC_RELAXED);
}

/* Whether it was one of the instructions. */
static int carry_out(const struct instruction *found) {
    if (found->opcode == 0x49 && found->is_memory && found->prefix == 0 && found->reg == 0)
        configure((const uint8_t *)(found->base + found->offset));
    else if (found->opcode == 0x49 && !found->is_memory && found->prefix == 0)
        memset(tiles, 0, sizeof tiles);
    else if (found->opcode == 0x49 && !found->is_memory && found->prefix == 3)
        memset(configured(found->reg)->data, 0, sizeof tiles->data);
    else if (found->opcode == 0x4B && found->is_memory && (found->prefix == 3 || found->prefix == 1))
        move(found, 0);
    else if (found->opcode == 0x4B && found->is_memory && found->prefix == 2)
        move(found, 1);
    else if (found->opcode == 0x5C && !found->is_memory && found->prefix == 2)
        multiply(found->reg, found->rm, found->vvvv);
    else
        return 0;
    return 1;
}

static void handle(int number, siginfo_t *information, void *memory) {
    ucontext_t *context = memory;
    struct instruction found;
    if (decode((const uint8_t *)context->uc_mcontext.gregs[REG_RIP], context, &found) && carry_out(&found))
        context->uc_mcontext.gregs[REG_RIP] += found.length;
    else if (before.sa_flags & SA_SIGINFO)
        before.sa_sigaction(number, information, memory);
    else
        signal(SIGILL, SIG_DFL); /* it comes again */
}

__attribute__((constructor)) static void start(void) {
    struct sigaction action = {.sa_sigaction = handle, .sa_flags = SA_SIGINFO | SA_NODEFER | SA_RESTART};
    sigaction(SIGILL, &action, &before);
}

__attribute__((destructor)) static void end(void) {
    const char *path = getenv("AMX_PRODUCTS");
    int file = path && products ? open(path, O_WRONLY | O_CREAT | O_APPEND, 0600) : -1;
    if (file >= 0) dprintf(file, "%lld\n", products);
}

/* The C library's, but for the request for permission to use tiles, which is granted. */
long syscall(long number, ...) {
    long a[6], result;
    va_list list;
    va_start(list, number);
    for (int i = 0; i < 6; i++) a[i] = va_arg(list, long);
    va_end(list);
    if (number == ARCH_PRCTL_CALL && a[0] == REQUEST_PERMISSION && a[1] == TILE_DATA) return 0;
    register long r10 __asm__("r10") = a[3], r8 __asm__("r8") = a[4], r9 __asm__("r9") = a[5];
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(number), "D"(a[0]), "S"(a[1]), "d"(a[2]), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    if (result >= 0 || result < -4095) return result;
    errno = (int)-result;
    return -1;
}
