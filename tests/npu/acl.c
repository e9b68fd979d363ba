/* Stand-in for the parts of CANN's libascendcl that torch_npu needs to be imported and to move memory.

   Devices are this machine's memory; all work is done when a call returns. Their number and name come from
   STAND_IN_DEVICES and STAND_IN_SOC. What is not here is refused by name (see stand_in.py): a stand-in must never
   answer "done" to work that it has not done. Written from the names that torch_npu leaves undefined and from
   CANN's public reference of AscendCL; no source of CANN. */
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { DONE = 0, NO_DEVICE = 507008, WRONG_DEVICE = 107001, NO_MEMORY = 207001 };
enum { ALIGNMENT = 512 };

static _Thread_local int32_t current;

static int32_t devices(void) {
    const char *number = getenv("STAND_IN_DEVICES");
    return number ? (int32_t)atoi(number) : 0;
}

static int new_object(void **made) {
    *made = malloc(sizeof(int64_t));
    return *made ? DONE : NO_MEMORY;
}

/* Devices */
int aclInit(const char *config) { (void)config; return devices() ? DONE : NO_DEVICE; }
int aclFinalize(void) { return DONE; }
int aclrtGetDeviceCount(uint32_t *count) { *count = (uint32_t)devices(); return DONE; }
int aclrtSetDevice(int32_t device) {
    if (device < 0 || device >= devices()) return WRONG_DEVICE;
    current = device;
    return DONE;
}
int aclrtGetDevice(int32_t *device) { *device = current; return DONE; }
int aclrtResetDevice(int32_t device) { (void)device; return DONE; }
int aclrtGetLogicDevIdByUserDevId(int32_t user, int32_t *logic) { *logic = user; return DONE; }
int aclrtDeviceGetBareTgid(int32_t *process) { *process = getpid(); return DONE; }
int aclrtDeviceCanAccessPeer(int32_t *can, int32_t one, int32_t other) { *can = one != other; return DONE; }
int aclrtDeviceEnablePeerAccess(int32_t peer, uint32_t flags) { (void)peer; (void)flags; return DONE; }
int aclGetDeviceCapability(uint32_t device, int what, int64_t *value) {
    (void)device; (void)what;
    *value = 0;
    return DONE;
}
int aclrtGetDeviceInfo(uint32_t device, int what, int64_t *value) {
    return aclGetDeviceCapability(device, what, value);
}
const char *aclrtGetSocName(void) {
    const char *name = getenv("STAND_IN_SOC");
    return name ? name : "Ascend910B1";
}
int aclrtGetCurrentContext(void **context) { *context = (void *)(intptr_t)(current + 1); return DONE; }
int aclrtSetCurrentContext(void *context) { current = (int32_t)(intptr_t)context - 1; return DONE; }
int aclrtGetPrimaryCtxState(int32_t device, uint32_t *flags, int32_t *active) {
    if (flags) *flags = 0;
    if (active) *active = device == current;
    return DONE;
}

/* Memory */
int aclrtMalloc(void **memory, size_t size, int policy) {
    (void)policy;
    return posix_memalign(memory, ALIGNMENT, size) ? NO_MEMORY : DONE;
}
int aclrtMallocAlign32(void **memory, size_t size, int policy) { return aclrtMalloc(memory, size, policy); }
int aclrtMallocHost(void **memory, size_t size) { return aclrtMalloc(memory, size, 0); }
int aclrtFree(void *memory) { free(memory); return DONE; }
int aclrtFreeHost(void *memory) { free(memory); return DONE; }
int aclrtMemcpy(void *to, size_t room, const void *from, size_t size, int kind) {
    (void)room; (void)kind;
    memmove(to, from, size);
    return DONE;
}
int aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t size, int kind, void *stream) {
    (void)stream;
    return aclrtMemcpy(to, room, from, size, kind);
}
int aclrtMemset(void *memory, size_t room, int32_t value, size_t size) {
    (void)room;
    memset(memory, value, size);
    return DONE;
}
int aclrtMemsetAsync(void *memory, size_t room, int32_t value, size_t size, void *stream) {
    (void)stream;
    return aclrtMemset(memory, room, value, size);
}
int aclrtGetMemInfo(int kind, size_t *left, size_t *total) {
    (void)kind;
    *total = (size_t)64 << 30;
    *left = (size_t)60 << 30;
    return DONE;
}

/* Streams and events: everything is over when it is asked for */
int aclrtCreateStream(void **stream) { return new_object(stream); }
int aclrtCreateStreamWithConfig(void **stream, uint32_t priority, uint32_t flags) {
    (void)priority; (void)flags;
    return new_object(stream);
}
int aclrtDestroyStream(void *stream) { free(stream); return DONE; }
int aclrtDestroyStreamForce(void *stream) { free(stream); return DONE; }
int aclrtSynchronizeDevice(void) { return DONE; }
int aclrtSynchronizeDeviceWithTimeout(int32_t timeout) { (void)timeout; return DONE; }
int aclrtSynchronizeStream(void *stream) { (void)stream; return DONE; }
int aclrtSynchronizeStreamWithTimeout(void *stream, int32_t timeout) { (void)stream; (void)timeout; return DONE; }
int aclrtStreamWaitEvent(void *stream, void *event) { (void)stream; (void)event; return DONE; }
int aclrtStreamQuery(void *stream, int *finished) { (void)stream; *finished = 1; return DONE; }
int aclrtStreamGetId(void *stream, int32_t *id) { (void)stream; *id = 0; return DONE; }
int aclrtSetStreamFailureMode(void *stream, uint64_t mode) { (void)stream; (void)mode; return DONE; }
int aclrtSetStreamOverflowSwitch(void *stream, uint32_t on) { (void)stream; (void)on; return DONE; }
int aclrtGetStreamOverflowSwitch(void *stream, uint32_t *on) { (void)stream; *on = 0; return DONE; }
int aclrtCreateEventWithFlag(void **event, uint32_t flags) { (void)flags; return new_object(event); }
int aclrtCreateEventExWithFlag(void **event, uint32_t flags) { (void)flags; return new_object(event); }
int aclrtDestroyEvent(void *event) { free(event); return DONE; }
int aclrtRecordEvent(void *event, void *stream) { (void)event; (void)stream; return DONE; }
int aclrtResetEvent(void *event, void *stream) { (void)event; (void)stream; return DONE; }
int aclrtSynchronizeEvent(void *event) { (void)event; return DONE; }
int aclrtQueryEventStatus(void *event, int *finished) { (void)event; *finished = 1; return DONE; }
int aclrtQueryEventWaitStatus(void *event, int *finished) { (void)event; *finished = 1; return DONE; }
int aclrtEventElapsedTime(float *milliseconds, void *start, void *end) {
    (void)start; (void)end;
    *milliseconds = 0;
    return DONE;
}
int aclrtProcessReport(int32_t timeout) { (void)timeout; usleep(1000); return DONE; }
int aclrtSubscribeReport(uint64_t thread, void *stream) { (void)thread; (void)stream; return DONE; }
int aclrtUnSubscribeReport(uint64_t thread, void *stream) { (void)thread; (void)stream; return DONE; }

/* Settings without an effect here */
int aclrtSetDeviceSatMode(int mode) { (void)mode; return DONE; }
int aclrtSetOpWaitTimeout(uint32_t seconds) { (void)seconds; return DONE; }
int aclrtSetOpExecuteTimeOut(uint32_t seconds) { (void)seconds; return DONE; }
int aclrtSetOpExecuteTimeOutV2(uint64_t asked, uint64_t *set) { *set = asked; return DONE; }
int aclrtCtxSetSysParamOpt(int option, int64_t value) { (void)option; (void)value; return DONE; }
int aclrtSetSysParamOpt(int option, int64_t value) { (void)option; (void)value; return DONE; }
int aclrtGetSysParamOpt(int option, int64_t *value) { (void)option; *value = 0; return DONE; }
int aclSetCompileopt(int option, const char *value) { (void)option; (void)value; return DONE; }
/* Atlas A2 and A3 compile no kernel while they run (ACL_OP_JIT_COMPILE, all that torch_npu asks for). */
size_t aclGetCompileoptSize(int option) { (void)option; return sizeof "disable"; }
int aclGetCompileopt(int option, char *value, size_t length) {
    (void)option;
    strncpy(value, "disable", length);
    return DONE;
}

/* Messages, dumps, profiling */
const char *aclGetRecentErrMsg(void) { return "emulated: the stand-in for libascendcl does not compute this"; }
int aclrtPeekAtLastError(int level) { (void)level; return DONE; }
int aclrtGetLastError(int level) { (void)level; return DONE; }
void aclAppLog(int level, const char *function, const char *file, uint32_t line, const char *format, ...) {
    (void)level; (void)function; (void)file; (void)line; (void)format;
}
int aclmdlInitDump(void) { return DONE; }
int aclmdlSetDump(const char *config) { (void)config; return DONE; }
int aclmdlFinalizeDump(void) { return DONE; }
uint64_t MsprofGetHashId(const char *text, size_t length) { (void)text; (void)length; return 0; }
uint64_t MsprofSysCycleTime(void) { return 0; }
int32_t MsprofRegisterCallback(uint32_t module, void *callback) { (void)module; (void)callback; return DONE; }
int32_t MsprofReportApi(uint32_t aging, const void *data) { (void)aging; (void)data; return DONE; }
int32_t MsprofReportCompactInfo(uint32_t aging, const void *data, uint32_t size) {
    (void)aging; (void)data; (void)size;
    return DONE;
}
int32_t MsprofReportAdditionalInfo(uint32_t aging, const void *data, uint32_t size) {
    (void)aging; (void)data; (void)size;
    return DONE;
}
