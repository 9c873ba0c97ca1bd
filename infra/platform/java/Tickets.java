import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.util.Properties;
import java.util.concurrent.CountDownLatch;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.StreamsBuilder;
import org.apache.kafka.streams.kstream.KStream;

/**
 * Kafka Streams around the two topics: each ticket becomes a prompt, and each answer a label:
 * {@code java -cp 'libs/*' Tickets.java BOOTSTRAP STATE_FOLDER [PREFIX]}. Nothing waits in it for a
 * model, so answers of minutes rebalance nothing.
 */
public final class Tickets {
    private static final ObjectMapper JSON = new ObjectMapper();

    public static void main(String[] args) throws Exception {
        String prefix = args.length > 2 ? args[2] : "";
        Properties settings = new Properties();
        settings.put("bootstrap.servers", args[0]);
        settings.put("state.dir", args[1]);
        settings.put("application.id", prefix + "tickets");
        settings.put("processing.guarantee", "exactly_once_v2");
        settings.put("default.key.serde", Serdes.StringSerde.class);
        settings.put("default.value.serde", Serdes.StringSerde.class);
        settings.put("consumer.auto.offset.reset", "earliest");

        StreamsBuilder builder = new StreamsBuilder();
        builder.<String, String>stream(prefix + "tickets")
                .mapValues(Tickets::prompt)
                .to(prefix + "prompts");
        KStream<String, String> answers = builder.stream(prefix + "answers");
        answers.mapValues(Tickets::label).to(prefix + "labels");

        KafkaStreams streams = new KafkaStreams(builder.build(), settings);
        CountDownLatch ended = new CountDownLatch(1);
        Runtime.getRuntime().addShutdownHook(new Thread(streams::close));
        streams.setStateListener((now, before) -> {
            System.out.println(now);
            if (now == KafkaStreams.State.ERROR) {
                ended.countDown();
            }
        });
        streams.start();
        ended.await();
        System.exit(1);
    }

    private static String prompt(String ticket) {
        return JSON.createObjectNode()
                .put("text", "Name the product of this ticket: " + ticket)
                .put("max_tokens", 16)
                .toString();
    }

    private static String label(String answer) {
        try {
            JsonNode found = JSON.readTree(answer);
            return found.path("error_code").asText("").isEmpty() || found.path("error_code").isNull()
                    ? found.path("text").asText()
                    : "unknown";
        } catch (Exception e) { // one bad record must not end the stream
            return "unknown";
        }
    }
}
