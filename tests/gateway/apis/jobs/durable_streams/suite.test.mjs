// The public suite for servers of Durable Streams, against the server that STREAMS_URL names.
import { runConformanceTests } from "@durable-streams/server-conformance-tests";

runConformanceTests({ baseUrl: process.env.STREAMS_URL });
