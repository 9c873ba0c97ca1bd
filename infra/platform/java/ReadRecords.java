import java.io.ByteArrayOutputStream;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayDeque;
import java.util.Collection;
import java.util.Deque;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.stream.Stream;
import org.apache.avro.AvroRuntimeException;
import org.apache.avro.Schema;
import org.apache.avro.SchemaNormalization;
import org.apache.avro.generic.GenericData;
import org.apache.avro.generic.GenericDatumWriter;
import org.apache.avro.generic.GenericRecord;
import org.apache.avro.io.EncoderFactory;
import org.apache.avro.io.JsonEncoder;
import org.apache.avro.message.BinaryMessageDecoder;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.StringDeserializer;

/**
 * Reads topics of Trivium with nothing but stock libraries and the folder of schemas:
 * {@code java -cp 'libs/*' ReadRecords.java BOOTSTRAP TOPIC,... schemas/avro [schemas/history]}.
 * Prints what is there now, a line each: name of the record, key, and the value as JSON. A value
 * has the fingerprint of its schema in front (Avro's single-object encoding), so no registry is
 * asked.
 */
public final class ReadRecords {
    public static void main(String[] args) throws Exception {
        Map<Long, BinaryMessageDecoder<GenericRecord>> decoders = decoders(args);
        Map<String, Object> settings =
                Map.of("bootstrap.servers", args[0], "isolation.level", "read_committed");
        try (KafkaConsumer<String, byte[]> consumer =
                new KafkaConsumer<>(settings, new StringDeserializer(), new ByteArrayDeserializer())) {
            List<TopicPartition> all =
                    Stream.of(args[1].split(","))
                            .flatMap(topic -> consumer.partitionsFor(topic).stream())
                            .map(each -> new TopicPartition(each.topic(), each.partition()))
                            .toList();
            consumer.assign(all);
            consumer.seekToBeginning(all);
            Map<TopicPartition, Long> ends = consumer.endOffsets(all);
            while (all.stream().anyMatch(each -> consumer.position(each) < ends.get(each))) {
                for (ConsumerRecord<String, byte[]> record : consumer.poll(Duration.ofMillis(500))) {
                    print(record, decoders);
                }
            }
        }
    }

    private static Map<Long, BinaryMessageDecoder<GenericRecord>> decoders(String[] args)
            throws Exception {
        Map<Long, BinaryMessageDecoder<GenericRecord>> found = new HashMap<>();
        schemas(files(args[2])).forEach(schema -> add(found, schema));
        for (int i = 3; i < args.length; i++) { // older versions are whole, each by itself
            for (Path file : files(args[i])) {
                add(found, new Schema.Parser().parse(file.toFile()));
            }
        }
        return found;
    }

    /** Files name types of other files: each is read once those are known. */
    private static Collection<Schema> schemas(List<Path> files) throws Exception {
        Map<String, Schema> known = new HashMap<>();
        Deque<Path> waiting = new ArrayDeque<>(files);
        AvroRuntimeException unknown = null;
        for (int tries = 0; !waiting.isEmpty(); tries++) {
            if (tries > files.size() * files.size()) {
                throw unknown;
            }
            Path file = waiting.poll();
            try {
                Schema.Parser parser = new Schema.Parser();
                Schema schema = parser.addTypes(known.values()).parse(file.toFile());
                known.put(schema.getFullName(), schema);
            } catch (AvroRuntimeException error) {
                unknown = error;
                waiting.add(file);
            }
        }
        return known.values();
    }

    private static List<Path> files(String folder) throws Exception {
        try (Stream<Path> all = Files.list(Path.of(folder))) {
            return all.filter(each -> each.toString().endsWith(".avsc")).sorted().toList();
        }
    }

    private static void add(Map<Long, BinaryMessageDecoder<GenericRecord>> found, Schema schema) {
        if (schema.getType() == Schema.Type.RECORD) {
            found.put(
                    SchemaNormalization.parsingFingerprint64(schema),
                    new BinaryMessageDecoder<>(GenericData.get(), schema));
        }
    }

    private static void print(
            ConsumerRecord<String, byte[]> record,
            Map<Long, BinaryMessageDecoder<GenericRecord>> decoders)
            throws Exception {
        byte[] value = record.value();
        if (value == null) {
            System.out.println("-\t" + record.key() + "\tnull");
            return;
        }
        if (value[0] == '{') { // answers to prompts that were JSON are JSON
            System.out.println("JSON\t" + record.key() + "\t" + new String(value, "UTF-8"));
            return;
        }
        // C3 01, then the fingerprint, least byte first
        long fingerprint = ByteBuffer.wrap(value).order(ByteOrder.LITTLE_ENDIAN).getLong(2);
        GenericRecord decoded = decoders.get(fingerprint).decode(value);
        ByteArrayOutputStream text = new ByteArrayOutputStream();
        JsonEncoder encoder = EncoderFactory.get().jsonEncoder(decoded.getSchema(), text);
        new GenericDatumWriter<>(decoded.getSchema()).write(decoded, encoder);
        encoder.flush();
        String name = decoded.getSchema().getName();
        System.out.println(name + "\t" + record.key() + "\t" + text.toString("UTF-8"));
    }
}
