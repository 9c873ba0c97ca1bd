import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import org.apache.flink.configuration.Configuration;
import org.apache.flink.table.api.EnvironmentSettings;
import org.apache.flink.table.api.ResultKind;
import org.apache.flink.table.api.TableEnvironment;
import org.apache.flink.table.api.TableResult;
import org.apache.flink.types.Row;
import org.apache.flink.util.CloseableIterator;

/**
 * Runs a file of Flink SQL in this JVM, with the mini-cluster that Flink starts for each job:
 * {@code java -cp 'libs/*' Sql.java file.sql}. A statement ends with a line that ends in a
 * semicolon; those of a statement set, up to {@code END;}, belong together. Rows of SELECT are
 * printed, their fields between tabs. It ends when all jobs have, with 1 if one has failed.
 */
public final class Sql {
    private static final Pattern SET = Pattern.compile("(?is)SET\\s+'([^']+)'\\s*=\\s*'([^']*)'");

    public static void main(String[] args) {
        int code = 0;
        try {
            run(args[0]);
        } catch (Throwable error) {
            error.printStackTrace();
            code = 1;
        }
        System.exit(code); // mini-clusters leave threads behind
    }

    private static void run(String file) throws Exception {
        Configuration configuration = new Configuration();
        List<String> statements = statements(Files.readAllLines(Path.of(file)));
        for (String statement : statements) {
            Matcher set = SET.matcher(statement);
            if (set.matches()) {
                configuration.setString(set.group(1), set.group(2));
            }
        }
        TableEnvironment tables =
                TableEnvironment.create(
                        EnvironmentSettings.newInstance()
                                .inStreamingMode()
                                .withConfiguration(configuration)
                                .build());
        List<TableResult> jobs = new ArrayList<>();
        for (String statement : statements) {
            if (SET.matcher(statement).matches()) {
                continue;
            }
            TableResult result = tables.executeSql(statement);
            if (result.getResultKind() == ResultKind.SUCCESS_WITH_CONTENT) {
                if (statement.toUpperCase().startsWith("SELECT")) {
                    print(result);
                } else {
                    jobs.add(result);
                }
            }
        }
        for (TableResult job : jobs) {
            job.await();
        }
    }

    static List<String> statements(List<String> lines) {
        List<String> found = new ArrayList<>();
        StringBuilder open = new StringBuilder();
        for (String line : lines) {
            if (line.isBlank() || line.stripLeading().startsWith("--")) {
                continue;
            }
            open.append(line).append('\n');
            String text = open.toString().strip();
            boolean isSet = text.toUpperCase().startsWith("EXECUTE STATEMENT SET");
            if (text.endsWith(";") && (!isSet || text.toUpperCase().endsWith("END;"))) {
                found.add(text.substring(0, text.length() - 1));
                open.setLength(0);
            }
        }
        if (!open.isEmpty()) {
            throw new IllegalArgumentException("expected a semicolon at the end of: " + open);
        }
        return found;
    }

    private static void print(TableResult result) throws Exception {
        try (CloseableIterator<Row> rows = result.collect()) {
            while (rows.hasNext()) {
                Row row = rows.next();
                List<String> fields = new ArrayList<>();
                for (int i = 0; i < row.getArity(); i++) {
                    fields.add(String.valueOf(row.getField(i)));
                }
                System.out.println("row\t" + String.join("\t", fields));
            }
        }
    }
}
