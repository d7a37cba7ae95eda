/* A stand-in for libnvidia-ml.so.1: NVIDIA's own header, and a file instead of a driver.
 *
 * NVML_STAND_IN_FILE names the file. It is looked at in every call and read anew when it was replaced, so that a test can change the
 * node while a program runs on it. Without the file the driver is not loaded. NVML_STAND_IN_LOG names a file to which every call appends
 * a line: the function, then what it was asked about. After each nvmlInit and nvmlShutdown that worked follows `initialised`, with how
 * many of the former are without the latter. Likewise `samples` after a GPM sample's buffer was made or freed.
 *
 * Compiled with -DWITHOUT_<function> the library lacks that symbol, as an older driver's does.
 *
 * The file has a directive per line:
 *
 *   driver 580.65.06
 *   device GPU-...                 a device; what follows is of it, up to the next `device` or `mig`
 *   mig MIG-... SLOT GI CI         a MIG device of the device above, likewise
 *   slots 7                        how many MIG devices the device may have
 *   name NVIDIA A100-SXM4-80GB
 *   minor 0
 *   bus 00000000:07:00.0
 *   memory TOTAL RESERVED USED     bytes, reserved not in used; without this line: not supported
 *   utilization 45
 *   process LIST PID BYTES GI CI   LIST is compute, graphics or mps; -1 bytes are hidden; -1 is no instance
 *   sample PID STAMP SM MEMORY ENCODER DECODER
 *   busy PID SM MEMORY ENCODER DECODER     a sample every 1/6 s of the wall clock, ten seconds of them
 *   samples from-the-start         the driver answers all samples, whatever stamp was seen last
 *   samples empty-success          no samples are a success and not NOT_FOUND
 *   gpm                            of a device: it has GPM
 *   counters BUSY TOTAL            of a MIG device: what a GPM sample of its GPU instance holds; the metric is the growth of BUSY in percent
 *                                  of that of TOTAL, -1 for both is an error
 *   records 32                     process records of 32 bytes, which the header has not: drivers 535.43 to 535.86
 *   call FUNCTION error CODE       FUNCTION is a symbol or *, before any device for what is asked of no device
 *   call FUNCTION insufficient N   the next N answers say INSUFFICIENT_SIZE, beyond questions for the size
 *   call FUNCTION hang             until the file says otherwise
 *   call FUNCTION delay MILLISECONDS
 */

#define NVML_NO_UNVERSIONED_FUNC_DEFS
#include <nvml.h>

#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { MAX_ENTITIES = 128, MAX_RULES = 32, MAX_PROCESSES = 256, MAX_SAMPLES = 1024, MAX_HANDLES = 256, NO_PARENT = -1 };

enum action { ERROR, INSUFFICIENT, HANG, DELAY };

struct rule {
    char function[64];
    enum action action;
    long value;
};

struct process {
    char list[16];
    unsigned int pid;
    long long bytes;
    int gpu_instance, compute_instance;
};

struct sample {
    unsigned int pid;
    unsigned long long stamp;
    unsigned int sm, memory, encoder, decoder;
};

/* A device or a MIG device. */
struct entity {
    char uuid[96], name[96], bus[32];
    int parent, slot, gpu_instance, compute_instance;
    unsigned int minor, slots, utilization;
    int has_gpm;
    double gpm_busy, gpm_total;
    int has_memory;
    unsigned long long total, reserved, used;
    int record_size, from_the_start, empty_success;
    struct process processes[MAX_PROCESSES];
    int process_count;
    struct sample samples[MAX_SAMPLES];
    int sample_count;
    struct sample busy[MAX_PROCESSES];
    int busy_count;
    struct rule rules[MAX_RULES];
    int rule_count;
};

/* A GPM sample. */
struct nvmlGpmSample_st {
    double busy, total;
};

/* What a handle points to. It outlives every change of the file. */
struct nvmlDevice_st {
    char uuid[96];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct entity entities[MAX_ENTITIES];
static int entity_count;
static struct rule rules[MAX_RULES];
static int rule_count;
static char driver[80];
static struct stat file_read;
static int is_loaded, initialised, gpm_samples;
static struct nvmlDevice_st handles[MAX_HANDLES];
static int handle_count;

static void add_rule(struct rule *to, int *count, const char *function, const char *action, long value)
{
    if (*count == MAX_RULES)
        return;
    struct rule *rule = &to[(*count)++];
    snprintf(rule->function, sizeof rule->function, "%.63s", function);
    rule->action = !strcmp(action, "insufficient") ? INSUFFICIENT : !strcmp(action, "hang") ? HANG : !strcmp(action, "delay") ? DELAY : ERROR;
    rule->value = value;
}

static struct entity *add_entity(const char *uuid, int parent)
{
    struct entity *entity = &entities[entity_count++];
    memset(entity, 0, sizeof *entity);
    snprintf(entity->uuid, sizeof entity->uuid, "%s", uuid);
    entity->parent = parent;
    entity->record_size = sizeof(nvmlProcessInfo_t);
    return entity;
}

static void parse(FILE *file)
{
    char line[512], first[96], second[96];
    struct entity *entity = NULL;
    int device = NO_PARENT;
    entity_count = rule_count = 0;
    while (fgets(line, sizeof line, file)) {
        char keyword[32] = "", *rest;
        int length = 0;
        line[strcspn(line, "\n")] = 0;
        sscanf(line, "%31s %n", keyword, &length);
        rest = line + length;
        if (!strcmp(keyword, "driver")) {
            snprintf(driver, sizeof driver, "%s", rest);
        } else if (!strcmp(keyword, "device") && entity_count < MAX_ENTITIES) {
            device = entity_count;
            entity = add_entity(rest, NO_PARENT);
        } else if (!strcmp(keyword, "mig") && entity_count < MAX_ENTITIES) {
            int slot, gpu_instance, compute_instance;
            sscanf(rest, "%95s %d %d %d", first, &slot, &gpu_instance, &compute_instance);
            entity = add_entity(first, device);
            entity->slot = slot, entity->gpu_instance = gpu_instance, entity->compute_instance = compute_instance;
        } else if (!strcmp(keyword, "call")) {
            long value = 0;
            sscanf(rest, "%95s %95s %ld", first, second, &value);
            add_rule(entity ? entity->rules : rules, entity ? &entity->rule_count : &rule_count, first, second, value);
        } else if (!entity) {
            continue;
        } else if (!strcmp(keyword, "slots")) {
            entity->slots = atoi(rest);
        } else if (!strcmp(keyword, "name")) {
            snprintf(entity->name, sizeof entity->name, "%.95s", rest);
        } else if (!strcmp(keyword, "minor")) {
            entity->minor = atoi(rest);
        } else if (!strcmp(keyword, "bus")) {
            snprintf(entity->bus, sizeof entity->bus, "%.31s", rest);
        } else if (!strcmp(keyword, "memory")) {
            entity->has_memory = sscanf(rest, "%llu %llu %llu", &entity->total, &entity->reserved, &entity->used) == 3;
        } else if (!strcmp(keyword, "utilization")) {
            entity->utilization = strtoul(rest, NULL, 10);
        } else if (!strcmp(keyword, "process") && entity->process_count < MAX_PROCESSES) {
            struct process *process = &entity->processes[entity->process_count++];
            sscanf(rest, "%15s %u %lld %d %d", process->list, &process->pid, &process->bytes, &process->gpu_instance,
                   &process->compute_instance);
        } else if (!strcmp(keyword, "sample") && entity->sample_count < MAX_SAMPLES) {
            struct sample *sample = &entity->samples[entity->sample_count++];
            sscanf(rest, "%u %llu %u %u %u %u", &sample->pid, &sample->stamp, &sample->sm, &sample->memory, &sample->encoder,
                   &sample->decoder);
        } else if (!strcmp(keyword, "busy") && entity->busy_count < MAX_PROCESSES) {
            struct sample *busy = &entity->busy[entity->busy_count++];
            sscanf(rest, "%u %u %u %u %u", &busy->pid, &busy->sm, &busy->memory, &busy->encoder, &busy->decoder);
        } else if (!strcmp(keyword, "samples")) {
            entity->from_the_start |= !strcmp(rest, "from-the-start");
            entity->empty_success |= !strcmp(rest, "empty-success");
        } else if (!strcmp(keyword, "gpm")) {
            entity->has_gpm = 1;
        } else if (!strcmp(keyword, "counters")) {
            sscanf(rest, "%lf %lf", &entity->gpm_busy, &entity->gpm_total);
        } else if (!strcmp(keyword, "records")) {
            entity->record_size = atoi(rest);
        }
    }
}

/* With the lock held. */
static void look_at_file(void)
{
    const char *path = getenv("NVML_STAND_IN_FILE");
    struct stat now;
    if (!path || stat(path, &now)) {
        is_loaded = 0;
        return;
    }
    if (is_loaded && now.st_ino == file_read.st_ino && now.st_size == file_read.st_size && now.st_mtim.tv_sec == file_read.st_mtim.tv_sec &&
        now.st_mtim.tv_nsec == file_read.st_mtim.tv_nsec)
        return;
    FILE *file = fopen(path, "r");
    is_loaded = file != NULL;
    if (!file)
        return;
    fstat(fileno(file), &file_read);
    parse(file);
    fclose(file);
}

static struct entity *find(const char *uuid)
{
    for (int i = 0; i < entity_count; i++)
        if (!strcmp(entities[i].uuid, uuid))
            return &entities[i];
    return NULL;
}

/* With the lock held. A device by its index, that is its place in the file. */
static struct entity *device_at(unsigned int index)
{
    for (int i = 0; i < entity_count; i++)
        if (entities[i].parent == NO_PARENT && index-- == 0)
            return &entities[i];
    return NULL;
}

static nvmlDevice_t handle_of(const struct entity *entity)
{
    for (int i = 0; i < handle_count; i++)
        if (!strcmp(handles[i].uuid, entity->uuid))
            return &handles[i];
    if (handle_count == MAX_HANDLES)
        abort();
    strcpy(handles[handle_count].uuid, entity->uuid);
    return &handles[handle_count++];
}

static void log_call(const char *function, const char *format, ...)
{
    const char *path = getenv("NVML_STAND_IN_LOG");
    char line[256], about[160] = "";
    va_list arguments;
    if (!path)
        return;
    if (format) {
        va_start(arguments, format);
        vsnprintf(about, sizeof about, format, arguments);
        va_end(arguments);
    }
    int length = snprintf(line, sizeof line, "%s %s\n", function, about);
    int descriptor = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (descriptor < 0)
        return;
    if (write(descriptor, line, length) != length)
        abort();
    close(descriptor);
}

static void sleep_milliseconds(long milliseconds)
{
    struct timespec time = {milliseconds / 1000, milliseconds % 1000 * 1000000};
    nanosleep(&time, NULL);
}

/* Begin a call: what the file says of it comes first. Answers NVML_SUCCESS with the lock held, or an error without. `uuid` is NULL for
 * what is asked of no device; `index` is used where it is not negative. `sizing` is a question for the size only. */
static nvmlReturn_t begin(const char *function, const char *uuid, int index, int sizing, struct entity **found)
{
    int delayed = 0;
    for (;;) {
        pthread_mutex_lock(&lock);
        look_at_file();
        struct entity *entity = uuid ? find(uuid) : index >= 0 ? device_at(index) : NULL;
        struct rule *of = entity ? entity->rules : rules;
        int count = entity ? entity->rule_count : rule_count;
        nvmlReturn_t answer = NVML_SUCCESS;
        long wait = 0;
        for (int i = 0; is_loaded && i < count && answer == NVML_SUCCESS && !wait; i++) {
            if (strcmp(of[i].function, function) && strcmp(of[i].function, "*"))
                continue;
            if (of[i].action == ERROR)
                answer = of[i].value;
            else if (of[i].action == HANG)
                wait = 5;
            else if (of[i].action == DELAY && !delayed)
                wait = of[i].value, delayed = 1;
            else if (of[i].action == INSUFFICIENT && !sizing && of[i].value > 0)
                of[i].value--, answer = NVML_ERROR_INSUFFICIENT_SIZE;
        }
        if (answer == NVML_SUCCESS && !wait && !is_loaded)
            answer = NVML_ERROR_DRIVER_NOT_LOADED;
        if (answer == NVML_SUCCESS && !wait && !initialised && strncmp(function, "nvmlInit", 8))
            answer = NVML_ERROR_UNINITIALIZED;
        if (answer == NVML_SUCCESS && !wait && !entity && (uuid || index >= 0))
            answer = index >= 0 ? NVML_ERROR_INVALID_ARGUMENT : NVML_ERROR_GPU_IS_LOST;
        if (found)
            *found = entity;
        if (answer == NVML_SUCCESS && !wait)
            return answer;
        pthread_mutex_unlock(&lock);
        if (!wait)
            return answer;
        sleep_milliseconds(wait);
    }
}

static nvmlReturn_t end(nvmlReturn_t answer)
{
    pthread_mutex_unlock(&lock);
    return answer;
}

/* The usual beginning of a function that is asked of a device. */
#define OF_DEVICE(function)                                                                                                              \
    struct entity *entity;                                                                                                               \
    log_call(function, "%s", device->uuid);                                                                                              \
    nvmlReturn_t begun = begin(function, device->uuid, -1, 0, &entity);                                                                  \
    if (begun != NVML_SUCCESS)                                                                                                           \
        return begun;

/* --- library --- */

static nvmlReturn_t initialise(const char *function)
{
    log_call(function, NULL);
    nvmlReturn_t answer = begin(function, NULL, -1, 0, NULL);
    if (answer != NVML_SUCCESS)
        return answer;
    log_call("initialised", "%d", ++initialised);
    return end(NVML_SUCCESS);
}

#ifndef WITHOUT_nvmlInitWithFlags
nvmlReturn_t nvmlInitWithFlags(unsigned int flags)
{
    (void)flags;
    return initialise("nvmlInitWithFlags");
}
#endif

nvmlReturn_t nvmlInit_v2(void)
{
    return initialise("nvmlInit_v2");
}

nvmlReturn_t nvmlShutdown(void)
{
    log_call("nvmlShutdown", NULL);
    nvmlReturn_t answer = begin("nvmlShutdown", NULL, -1, 0, NULL);
    if (answer == NVML_ERROR_DRIVER_NOT_LOADED) {
        /* The library's own part of it needs no driver. */
        pthread_mutex_lock(&lock);
        answer = initialised ? NVML_SUCCESS : NVML_ERROR_UNINITIALIZED;
    } else if (answer != NVML_SUCCESS) {
        return answer;
    }
    if (answer == NVML_SUCCESS)
        log_call("initialised", "%d", --initialised);
    return end(answer);
}

const char *nvmlErrorString(nvmlReturn_t result)
{
    static __thread char text[48];
    snprintf(text, sizeof text, "Error %d of the stand-in", result);
    return text;
}

nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int length)
{
    log_call("nvmlSystemGetDriverVersion", NULL);
    nvmlReturn_t answer = begin("nvmlSystemGetDriverVersion", NULL, -1, 0, NULL);
    if (answer != NVML_SUCCESS)
        return answer;
    snprintf(version, length, "%s", driver);
    return end(NVML_SUCCESS);
}

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count)
{
    log_call("nvmlDeviceGetCount_v2", NULL);
    nvmlReturn_t answer = begin("nvmlDeviceGetCount_v2", NULL, -1, 0, NULL);
    if (answer != NVML_SUCCESS)
        return answer;
    for (*count = 0; device_at(*count);)
        ++*count;
    return end(NVML_SUCCESS);
}

/* --- facts of a device --- */

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device)
{
    struct entity *entity;
    log_call("nvmlDeviceGetHandleByIndex_v2", "%u", index);
    nvmlReturn_t answer = begin("nvmlDeviceGetHandleByIndex_v2", NULL, index, 0, &entity);
    if (answer != NVML_SUCCESS)
        return answer;
    *device = handle_of(entity);
    return end(NVML_SUCCESS);
}

static nvmlReturn_t put(const char *text, char *to, unsigned int length)
{
    if (strlen(text) >= length)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    strcpy(to, text);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int length)
{
    OF_DEVICE("nvmlDeviceGetUUID")
    return end(put(entity->uuid, uuid, length));
}

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int length)
{
    OF_DEVICE("nvmlDeviceGetName")
    return end(put(entity->name, name, length));
}

nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t device, unsigned int *minor)
{
    OF_DEVICE("nvmlDeviceGetMinorNumber")
    *minor = entity->minor;
    return end(entity->parent == NO_PARENT ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT);
}

nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
    OF_DEVICE("nvmlDeviceGetPciInfo_v3")
    memset(pci, 0, sizeof *pci);
    return end(put(entity->bus, pci->busId, sizeof pci->busId));
}

nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
    OF_DEVICE("nvmlDeviceGetMemoryInfo")
    if (!entity->has_memory)
        return end(NVML_ERROR_NOT_SUPPORTED);
    memory->total = entity->total;
    memory->used = entity->used + entity->reserved;
    memory->free = memory->total - memory->used;
    return end(NVML_SUCCESS);
}

#ifndef WITHOUT_nvmlDeviceGetMemoryInfo_v2
nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
    OF_DEVICE("nvmlDeviceGetMemoryInfo_v2")
    if (memory->version != nvmlMemory_v2)
        return end(NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    if (!entity->has_memory)
        return end(NVML_ERROR_NOT_SUPPORTED);
    memory->total = entity->total;
    memory->reserved = entity->reserved;
    memory->used = entity->used;
    memory->free = memory->total - memory->used - memory->reserved;
    return end(NVML_SUCCESS);
}
#endif

/* --- MIG --- */

static int has_migs(const struct entity *device)
{
    for (int i = 0; i < entity_count; i++)
        if (entities[i].parent != NO_PARENT && &entities[entities[i].parent] == device)
            return 1;
    return 0;
}

#ifndef WITHOUT_nvmlDeviceGetMaxMigDeviceCount
nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned int *count)
{
    OF_DEVICE("nvmlDeviceGetMaxMigDeviceCount")
    *count = entity->slots;
    return end(NVML_SUCCESS);
}
#endif

nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned int index, nvmlDevice_t *mig)
{
    OF_DEVICE("nvmlDeviceGetMigDeviceHandleByIndex")
    for (int i = 0; i < entity_count; i++)
        if (entities[i].parent != NO_PARENT && &entities[entities[i].parent] == entity && entities[i].slot == (int)index) {
            *mig = handle_of(&entities[i]);
            return end(NVML_SUCCESS);
        }
    return end(NVML_ERROR_NOT_FOUND);
}

nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t device, unsigned int *id)
{
    OF_DEVICE("nvmlDeviceGetGpuInstanceId")
    *id = entity->gpu_instance;
    return end(entity->parent == NO_PARENT ? NVML_ERROR_NOT_SUPPORTED : NVML_SUCCESS);
}

nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t device, unsigned int *id)
{
    OF_DEVICE("nvmlDeviceGetComputeInstanceId")
    *id = entity->compute_instance;
    return end(entity->parent == NO_PARENT ? NVML_ERROR_NOT_SUPPORTED : NVML_SUCCESS);
}

/* --- processes --- */

/* Drivers 535.43 to 535.86 filled this where the caller had made room for nvmlProcessInfo_v2_t. */
struct wide_record {
    unsigned int pid;
    unsigned long long usedGpuMemory;
    unsigned int gpuInstanceId, computeInstanceId;
    unsigned long long usedGpuCcProtectedMemory;
};

static nvmlReturn_t list_processes(const char *function, const char *list, nvmlDevice_t device, unsigned int *count, void *infos)
{
    struct entity *entity;
    unsigned int listed = 0, room = *count;
    log_call(function, "%s", device->uuid);
    nvmlReturn_t begun = begin(function, device->uuid, -1, infos == NULL, &entity);
    if (begun != NVML_SUCCESS)
        return begun;
    for (int i = 0; i < entity->process_count; i++)
        listed += !strcmp(entity->processes[i].list, list);
    *count = listed;
    if (!listed)
        return end(NVML_SUCCESS);
    if (!infos || room < listed)
        return end(NVML_ERROR_INSUFFICIENT_SIZE);
    char *to = infos;
    for (int i = 0; i < entity->process_count; i++) {
        const struct process *process = &entity->processes[i];
        if (strcmp(process->list, list))
            continue;
        struct wide_record record = {process->pid, process->bytes, process->gpu_instance, process->compute_instance, 0};
        int size = strstr(function, "_v3") ? entity->record_size : (int)sizeof(nvmlProcessInfo_v2_t);
        if (to + size > (char *)infos + room * sizeof(nvmlProcessInfo_t))
            abort();
        memcpy(to, &record, size);
        to += size;
    }
    return end(NVML_SUCCESS);
}

#define PROCESS_LIST(function, list)                                                                                                     \
    nvmlReturn_t function(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_t *infos)                                            \
    {                                                                                                                                    \
        return list_processes(#function, list, device, count, infos);                                                                    \
    }

#ifndef WITHOUT_nvmlDeviceGetComputeRunningProcesses_v3
PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses_v3, "compute")
#endif
#ifndef WITHOUT_nvmlDeviceGetComputeRunningProcesses_v2
PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses_v2, "compute")
#endif
#ifndef WITHOUT_nvmlDeviceGetGraphicsRunningProcesses_v3
PROCESS_LIST(nvmlDeviceGetGraphicsRunningProcesses_v3, "graphics")
#endif
#ifndef WITHOUT_nvmlDeviceGetGraphicsRunningProcesses_v2
PROCESS_LIST(nvmlDeviceGetGraphicsRunningProcesses_v2, "graphics")
#endif
#ifndef WITHOUT_nvmlDeviceGetMPSComputeRunningProcesses_v3
PROCESS_LIST(nvmlDeviceGetMPSComputeRunningProcesses_v3, "mps")
#endif
#ifndef WITHOUT_nvmlDeviceGetMPSComputeRunningProcesses_v2
PROCESS_LIST(nvmlDeviceGetMPSComputeRunningProcesses_v2, "mps")
#endif

/* --- utilization --- */

nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *rates)
{
    OF_DEVICE("nvmlDeviceGetUtilizationRates")
    rates->gpu = entity->utilization;
    rates->memory = 0;
    return end(entity->parent != NO_PARENT || has_migs(entity) ? NVML_ERROR_NOT_SUPPORTED : NVML_SUCCESS);
}

static int collect_samples(const struct entity *entity, unsigned long long last_seen, struct sample *to)
{
    int count = 0;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    unsigned long long ticks = (now.tv_sec * 1000000ull + now.tv_nsec / 1000) * 6 / 1000000;
    if (entity->from_the_start)
        last_seen = 0;
    for (int i = 0; i < entity->sample_count; i++)
        if (entity->samples[i].stamp > last_seen || entity->samples[i].stamp == 0)
            to[count++] = entity->samples[i];
    for (unsigned long long tick = ticks - 60; tick <= ticks; tick++)
        for (int i = 0; i < entity->busy_count && count < 2 * MAX_SAMPLES; i++) {
            to[count] = entity->busy[i];
            to[count].stamp = tick * 1000000 / 6;
            count += to[count].stamp > last_seen;
        }
    return count;
}

#ifndef WITHOUT_nvmlDeviceGetProcessUtilization
nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t device, nvmlProcessUtilizationSample_t *samples, unsigned int *count,
                                             unsigned long long last_seen)
{
    struct entity *entity;
    struct sample collected[2 * MAX_SAMPLES + 1];
    unsigned int room = *count;
    log_call("nvmlDeviceGetProcessUtilization", "%s %llu%s", device->uuid, last_seen, samples ? "" : " size");
    nvmlReturn_t begun = begin("nvmlDeviceGetProcessUtilization", device->uuid, -1, samples == NULL, &entity);
    if (begun != NVML_SUCCESS)
        return begun;
    if (entity->parent != NO_PARENT || has_migs(entity))
        return end(NVML_ERROR_NOT_SUPPORTED);
    *count = collect_samples(entity, last_seen, collected);
    if (!*count)
        return end(entity->empty_success ? NVML_SUCCESS : NVML_ERROR_NOT_FOUND);
    if (!samples || room < *count)
        return end(NVML_ERROR_INSUFFICIENT_SIZE);
    for (unsigned int i = 0; i < *count; i++)
        samples[i] = (nvmlProcessUtilizationSample_t){collected[i].pid,    collected[i].stamp,   collected[i].sm,
                                                      collected[i].memory, collected[i].encoder, collected[i].decoder};
    return end(NVML_SUCCESS);
}
#endif

#ifndef WITHOUT_nvmlDeviceGetProcessesUtilizationInfo
nvmlReturn_t nvmlDeviceGetProcessesUtilizationInfo(nvmlDevice_t device, nvmlProcessesUtilizationInfo_t *info)
{
    struct entity *entity;
    struct sample collected[2 * MAX_SAMPLES + 1];
    unsigned int room = info->processSamplesCount;
    log_call("nvmlDeviceGetProcessesUtilizationInfo", "%s %llu%s", device->uuid, info->lastSeenTimeStamp,
             info->procUtilArray ? "" : " size");
    nvmlReturn_t begun = begin("nvmlDeviceGetProcessesUtilizationInfo", device->uuid, -1, info->procUtilArray == NULL, &entity);
    if (begun != NVML_SUCCESS)
        return begun;
    if (info->version != nvmlProcessesUtilizationInfo_v1)
        return end(NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    if (entity->parent != NO_PARENT || has_migs(entity))
        return end(NVML_ERROR_NOT_SUPPORTED);
    info->processSamplesCount = collect_samples(entity, info->lastSeenTimeStamp, collected);
    if (!info->processSamplesCount)
        return end(entity->empty_success ? NVML_SUCCESS : NVML_ERROR_NOT_FOUND);
    if (!info->procUtilArray || room < info->processSamplesCount)
        return end(NVML_ERROR_INSUFFICIENT_SIZE);
    for (unsigned int i = 0; i < info->processSamplesCount; i++)
        info->procUtilArray[i] = (nvmlProcessUtilizationInfo_v1_t){
            collected[i].stamp, collected[i].pid, collected[i].sm, collected[i].memory, collected[i].encoder, collected[i].decoder, 0, 0};
    return end(NVML_SUCCESS);
}
#endif

/* --- GPM --- */

#ifndef WITHOUT_nvmlGpmQueryDeviceSupport
nvmlReturn_t nvmlGpmQueryDeviceSupport(nvmlDevice_t device, nvmlGpmSupport_t *support)
{
    OF_DEVICE("nvmlGpmQueryDeviceSupport")
    if (support->version != NVML_GPM_SUPPORT_VERSION)
        return end(NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    support->isSupportedDevice = entity->has_gpm;
    return end(NVML_SUCCESS);
}
#endif

nvmlReturn_t nvmlGpmSampleAlloc(nvmlGpmSample_t *sample)
{
    log_call("nvmlGpmSampleAlloc", NULL);
    nvmlReturn_t answer = begin("nvmlGpmSampleAlloc", NULL, -1, 0, NULL);
    if (answer != NVML_SUCCESS)
        return answer;
    *sample = calloc(1, sizeof **sample);
    log_call("samples", "%d", ++gpm_samples);
    return end(*sample ? NVML_SUCCESS : NVML_ERROR_MEMORY);
}

nvmlReturn_t nvmlGpmSampleFree(nvmlGpmSample_t sample)
{
    log_call("nvmlGpmSampleFree", NULL);
    nvmlReturn_t answer = begin("nvmlGpmSampleFree", NULL, -1, 0, NULL);
    if (answer != NVML_SUCCESS)
        return answer;
    free(sample);
    log_call("samples", "%d", --gpm_samples);
    return end(NVML_SUCCESS);
}

nvmlReturn_t nvmlGpmMigSampleGet(nvmlDevice_t device, unsigned int gpu_instance, nvmlGpmSample_t sample)
{
    struct entity *entity;
    log_call("nvmlGpmMigSampleGet", "%s %u", device->uuid, gpu_instance);
    nvmlReturn_t begun = begin("nvmlGpmMigSampleGet", device->uuid, -1, 0, &entity);
    if (begun != NVML_SUCCESS)
        return begun;
    for (int i = 0; i < entity_count; i++)
        if (entities[i].parent != NO_PARENT && &entities[entities[i].parent] == entity && entities[i].gpu_instance == (int)gpu_instance) {
            sample->busy = entities[i].gpm_busy;
            sample->total = entities[i].gpm_total;
            return end(entity->has_gpm ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED);
        }
    return end(NVML_ERROR_INVALID_ARGUMENT);
}

nvmlReturn_t nvmlGpmMetricsGet(nvmlGpmMetricsGet_t *request)
{
    log_call("nvmlGpmMetricsGet", NULL);
    nvmlReturn_t answer = begin("nvmlGpmMetricsGet", NULL, -1, 0, NULL);
    if (answer != NVML_SUCCESS)
        return answer;
    if (request->version != NVML_GPM_METRICS_GET_VERSION)
        return end(NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    for (unsigned int i = 0; i < request->numMetrics; i++) {
        nvmlGpmMetric_t *metric = &request->metrics[i];
        int is_known = metric->metricId == NVML_GPM_METRIC_SM_UTIL && request->sample2->total >= 0;
        metric->nvmlReturn = is_known ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
        metric->value = 100 * (request->sample2->busy - request->sample1->busy) / (request->sample2->total - request->sample1->total);
    }
    return end(NVML_SUCCESS);
}
