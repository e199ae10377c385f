// Clients that read streams: `sink PORT MODEL KEY STREAMS TOKENS INTERVAL_US SECONDS`, a JSON object to stdout.
// With SECONDS 0 every stream is read once, begun over one second: how long after its write each token arrived, over the
// time in which all streams ran. Else streams follow each other on STREAMS connections for that long: answers per second.
#include "http.hpp"

namespace {

constexpr int STAMP = 18;  // @, 16 digits, @

struct Stream {
    int fd = -1;
    std::string rest;  // what a stamp or the end may be split over
    int64_t first = 0, last = 0, delay = 0;  // write of the first and last token, delay of the last
    int seen = 0;
    bool checked = false, done = false;
};

struct Sample {
    int64_t written, delay;
};

std::vector<Stream> streams;
std::vector<Sample> samples;
int tokens, finished = 0, failed = 0;
long answers = 0;
std::string complaint;

int64_t stamp_at(const std::string& text, size_t at) {
    if (text[at + STAMP - 1] != '@') return 0;
    int64_t value = 0;
    for (size_t n = at + 1; n < at + STAMP - 1; n++) {
        if (text[n] < '0' || text[n] > '9') return 0;
        value = value * 10 + (text[n] - '0');
    }
    return value;
}

void fail(Stream& stream, const std::string& why) {
    if (complaint.empty()) complaint = why.substr(0, 300);
    failed++;
    finished++;
    stream.done = true;
    close(stream.fd);
}

void scan(Stream& stream, int64_t now, bool keep) {
    std::string& text = stream.rest;
    size_t from = 0, at;
    while ((at = text.find('@', from)) != std::string::npos && at + STAMP <= text.size()) {
        int64_t written = stamp_at(text, at);
        from = written ? at + STAMP : at + 1;
        if (!written) continue;
        if (!stream.seen++) stream.first = written;
        stream.last = written;
        stream.delay = now - written;
        if (keep) samples.push_back({written, now - written});
    }
}

// Whether the response is complete; what may still matter stays in `rest`.
bool ended(Stream& stream) {
    const std::string& text = stream.rest;
    bool over = text.size() >= 5 && text.compare(text.size() - 5, 5, "0\r\n\r\n") == 0 && stream.seen >= tokens;
    if (text.size() > 64) stream.rest.erase(0, text.size() - 64);
    // a stamp that was counted must not be found again
    std::replace(stream.rest.begin(), stream.rest.end() - std::min<size_t>(stream.rest.size(), STAMP - 1), '@', ' ');
    return over;
}

void take(Stream& stream, bool keep) {
    char data[65536];
    ssize_t got = read(stream.fd, data, sizeof data);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (got <= 0) return fail(stream, "the connection ended early");
    int64_t now = now_ns();
    if (!stream.checked) {
        if (got < 12 || memcmp(data + 9, "200", 3) != 0) return fail(stream, std::string(data, got));
        stream.checked = true;
    }
    stream.rest.append(data, got);
    scan(stream, now, keep);
    if (ended(stream)) {
        stream.done = true;
        finished++;
        answers++;
    }
}

void watch(int poll, size_t index) {
    epoll_event readable{EPOLLIN, {.u64 = index}};
    epoll_ctl(poll, EPOLL_CTL_ADD, streams[index].fd, &readable);
}

void report_paced(int64_t interval_ns) {
    int64_t from = 0, to = INT64_MAX, worst_lag = 0;
    int late = 0;
    for (const Stream& stream : streams) {
        if (stream.seen < tokens) continue;
        from = std::max(from, stream.first);
        to = std::min(to, stream.last);
        worst_lag = std::max(worst_lag, stream.last - stream.first - (tokens - 1) * interval_ns);
        late += stream.delay > interval_ns;
    }
    std::vector<int64_t> delays;
    for (const Sample& sample : samples)
        if (sample.written >= from && sample.written <= to) delays.push_back(sample.delay);
    std::sort(delays.begin(), delays.end());
    printf("\"measured\":%zu,\"p50_ms\":%.4f,\"p99_ms\":%.4f,\"max_ms\":%.4f,\"late\":%d,\"source_lag_ms\":%.3f", delays.size(),
           quantile(delays, 0.5), quantile(delays, 0.99), quantile(delays, 1.0), late + failed, worst_lag / 1e6);
}

}  // namespace

int main(int, char** argv) {
    begin();
    int port = atoi(argv[1]);
    size_t count = atoi(argv[4]);
    tokens = atoi(argv[5]);
    int64_t interval_ns = atoll(argv[6]) * 1000, seconds = atoll(argv[7]);
    std::string message = request(port, argv[2], argv[3], true);
    streams.resize(count);
    int poll = epoll_create1(0);
    int64_t began = now_ns(), until = began + seconds * 1'000'000'000;
    int64_t deadline = seconds ? until + 30'000'000'000 : began + tokens * interval_ns + 30'000'000'000;
    int64_t spread = seconds ? 0 : 1'000'000'000 / static_cast<int64_t>(count);
    std::vector<epoll_event> events(1024);
    size_t started = 0;
    int64_t stopped = 0;
    while (finished < static_cast<int>(count) && now_ns() < deadline) {
        while (started < count && now_ns() >= began + static_cast<int64_t>(started) * spread) {
            Stream& stream = streams[started];
            stream.fd = dial(port);
            fcntl(stream.fd, F_SETFL, O_NONBLOCK);
            write_all(stream.fd, message);
            watch(poll, started++);
        }
        int ready = epoll_wait(poll, events.data(), events.size(), started < count ? 1 : 100);
        for (int n = 0; n < ready; n++) {
            Stream& stream = streams[events[n].data.u64];
            if (stream.done) continue;
            take(stream, !seconds);
            if (!stream.done || stream.seen < tokens || !seconds) continue;
            if (now_ns() >= until) {
                stopped = now_ns();
                continue;
            }
            finished--;
            stream.rest.clear();
            stream.seen = 0;
            stream.checked = stream.done = false;
            write_all(stream.fd, message);
        }
    }
    int incomplete = static_cast<int>(count) - finished + failed;
    for (const Stream& stream : streams)
        if (!stream.done && complaint.empty())
            complaint = std::to_string(stream.seen) + " tokens came, the last bytes are: " + stream.rest;
    printf("{");
    if (seconds) {
        printf("\"answers_s\":%.2f", answers / (((stopped ? stopped : now_ns()) - began) / 1e9));
    } else {
        report_paced(interval_ns);
    }
    for (char& letter : complaint)
        if (letter < ' ' || letter == '"' || letter == '\\') letter = ' ';
    printf(",\"answers\":%ld,\"incomplete\":%d,\"complaint\":\"%s\"}\n", answers, incomplete, complaint.c_str());
}
